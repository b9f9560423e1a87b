"""Sizes that samples decide: the length of the longest of them, and the number of rows of packed data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxgrad.independence import longest
from fxgrad.independence.calls import Call, Origins
from fxgrad.independence.longest.places import whole
from fxgrad.independence.longest.steps import WIDE, Padded, Seen
from fxgrad.independence.rules import pointwise
from fxgrad.independence.rules.registry import Rule

_SIZES = {
    **dict.fromkeys("view _unsafe_view expand zeros ones full empty rand randn".split(), "size"),
    **dict.fromkeys("new_zeros new_ones new_full new_empty".split(), "size"),
    "reshape": "shape",
}
_MOVES = frozenset("transpose t permute unsqueeze squeeze expand view _unsafe_view reshape".split())
_CASTS = frozenset("detach clone alias _to_copy".split())
_SAME_NUMBERS = _CASTS | frozenset("expand view unsqueeze squeeze transpose".split())


class Padding:
    """The symbols of such sizes.

    Samples may hide in what is padded in two ways: an op may count the steps, and what stands behind the end of a
    shorter sample may add to its result. `longest` looks at both.
    """

    def __init__(self) -> None:
        self.lengths: dict[Any, int | None] = {}  # of the longest sample, and of which packed sequence it is
        self.rows: set[Any] = set()  # how many rows packed data has

    def enter(self, length: Any, pack: int | None) -> None:
        """Take a symbol for how many steps the longest sample of a packed sequence has."""
        self.rows.discard(length)
        self.lengths[length] = pack

    def __bool__(self) -> bool:
        return bool(self.lengths or self.rows)

    def __contains__(self, symbol: Any) -> bool:
        return symbol in self.lengths or symbol in self.rows

    def along(self, size: Any) -> bool:
        """Whether a size is made of the length of a longest sample."""
        return not self.lengths.keys().isdisjoint(_free(size))

    def lone(self, size: Any) -> bool:
        """Whether it is that length itself."""
        return isinstance(size, torch.SymInt) and size.node.expr in self.lengths

    def pack(self, length: Any) -> int | None:
        return self.lengths.get(length)

    def after(self, call: Call, rule: Rule | None) -> list[Padded]:
        """What is known of each output along longest samples; `Seen` where a call may tell how long they are."""
        tensors = [tensor for _, tensor in call.tensors()]
        outputs = [out for out in call.outputs if isinstance(out, Tensor)]
        if any(self.along(size) for tensor in (*tensors, *outputs) for size in tensor.shape):
            return longest.after(call, rule, self)
        elif self._counts(call, rule, tensors, outputs):
            raise Seen
        return [{} for _ in call.outputs]

    def _counts(self, call: Call, rule: Rule | None, tensors: list[Tensor], outputs: list[Tensor]) -> bool:
        """Whether a call may count the rows of packed data: a constant of that size becomes something else."""
        held = [tensor for tensor in tensors if self._of_rows(tensor)]
        if not held or call.func.namespace == "fxgrad":
            return False
        kept = all(map(self._of_rows, outputs))
        each = (rule is not None and rule.__module__ == pointwise.__name__) or call.name in _MOVES
        if all(call.origins(tensor).alone for tensor in tensors):
            return not (kept and each)
        mean = call.name == "mean" or call.arguments.get("reduction") == 1
        return call.clips and mean and not kept

    def _of_rows(self, tensor: Tensor) -> bool:
        return any(not self.rows.isdisjoint(_free(size)) for size in tensor.shape)

    def read(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        """The arguments whose numbers an op does more with than make a size of them."""
        given = dict(arguments)
        given.pop(_SIZES.get(name, ""), None)
        if name == "arange" and self.lone(arguments["end"]):
            given.pop("end")
        return torch.utils._pytree.tree_leaves(given)


def _free(size: Any) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()


def numbers_of(
    name: str, arguments: Mapping[str, Any], of: Callable[[Tensor], Origins], out: Tensor, origins: Origins
) -> Origins:
    """What is known of the whole numbers in a result, besides."""
    source = arguments.get("self")
    if not isinstance(source, Tensor) or source.dtype not in WIDE or out.dtype not in WIDE:
        return origins
    same = name in _SAME_NUMBERS or (name == "slice" and whole(arguments, source.shape[arguments["dim"]]))
    if not same:
        return replace(origins, least=_least(name, arguments, of))
    exact = source.dtype == out.dtype or (source.dtype is torch.int32 and out.dtype is torch.int64)
    cast = source if name in _CASTS and exact else None
    if source.dtype.is_floating_point and source.dtype != out.dtype:
        return origins  # it may be rounded
    return replace(origins, least=of(source).least, ends=of(source).ends, cast_of=cast)


def _least(name: str, arguments: Mapping[str, Any], of: Callable[[Tensor], Origins]) -> int | None:
    """The least value that an integer result is known to have."""
    own: int | None = of(arguments["self"]).least
    other, low = arguments.get("other"), arguments.get("min")
    if name in ("clamp", "clamp_min") and type(low) is int and arguments.get("max") is None:
        return low if own is None else max(low, own)
    if own is None or type(other) is not int or arguments.get("alpha", 1) != 1:
        return None
    return own + other if name == "add" else own - other if name == "sub" else None
