"""Sizes that depend on samples: the length of the longest sample, and the number of rows of packed data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxgrad.host.pytree import tree_leaves
from fxgrad.proof import longest
from fxgrad.proof.calls import Call, Origins
from fxgrad.proof.longest.places import whole
from fxgrad.proof.longest.steps import WIDE, Padded, Seen
from fxgrad.proof.rules import pointwise
from fxgrad.proof.rules.registry import Rule

_SIZES = {
    **dict.fromkeys("view _unsafe_view expand zeros ones full empty rand randn".split(), "size"),
    **dict.fromkeys("new_zeros new_ones new_full new_empty".split(), "size"),
    "reshape": "shape",
}
_MOVES = frozenset("transpose t permute unsqueeze squeeze expand view _unsafe_view reshape".split())
_CASTS = frozenset("detach clone alias _to_copy".split())
_SAME_NUMBERS = _CASTS | frozenset("expand view unsqueeze squeeze transpose".split())


class Padding:
    """The symbols of sizes that depend on samples.

    Samples can influence each other through padding in two ways. An op may count the steps, or the padding may add to
    the result of a shorter sample. `longest` checks both.
    """

    def __init__(self) -> None:
        self.lengths: dict[Any, int | None] = {}  # lengths of a longest sample -> its packed sequence
        self.rows: set[Any] = set()  # row counts of packed data

    def enter(self, length: Any, pack: int | None) -> None:
        """Register a symbol as the length of the longest sample of a packed sequence."""
        self.rows.discard(length)
        self.lengths[length] = pack

    def __bool__(self) -> bool:
        return bool(self.lengths or self.rows)

    def __contains__(self, symbol: Any) -> bool:
        return symbol in self.lengths or symbol in self.rows

    def along(self, size: Any) -> bool:
        """Decide whether a size contains the length of a longest sample."""
        return not self.lengths.keys().isdisjoint(_free(size))

    def lone(self, size: Any) -> bool:
        """Decide whether a size is exactly the length of a longest sample."""
        return isinstance(size, torch.SymInt) and size.node.expr in self.lengths

    def pack(self, length: Any) -> int | None:
        return self.lengths.get(length)

    def after(self, call: Call, rule: Rule | None) -> list[Padded]:
        """Return the padded dimensions of each output; raise `Seen` if the call may see the longest length."""
        tensors = [tensor for _, tensor in call.tensors()]
        outputs = [out for out in call.outputs if isinstance(out, Tensor)]
        if any(self.along(size) for tensor in (*tensors, *outputs) for size in tensor.shape):
            return longest.after(call, rule, self)
        elif self._counts(call, rule, tensors, outputs):
            raise Seen
        return [{} for _ in call.outputs]

    def _counts(self, call: Call, rule: Rule | None, tensors: list[Tensor], outputs: list[Tensor]) -> bool:
        """Decide whether a call may count the rows of packed data, as in a sum over a constant of that size."""
        of_rows = [tensor for tensor in tensors if self._of_rows(tensor)]
        if not of_rows or call.func.namespace == "fxgrad":
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
        """Return the leaves of the arguments that an op uses for more than the sizes of its output."""
        read = dict(arguments)
        read.pop(_SIZES.get(name, ""), None)
        if name == "arange" and self.lone(arguments["end"]):
            read.pop("end")
        return tree_leaves(read)


def _free(size: Any) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()


def numbers_of(
    name: str, arguments: Mapping[str, Any], of: Callable[[Tensor], Origins], out: Tensor, origins: Origins
) -> Origins:
    """Add the known bounds of the integers in a result to its origins."""
    source = arguments.get("self")
    if not isinstance(source, Tensor) or source.dtype not in WIDE or out.dtype not in WIDE:
        return origins
    same = name in _SAME_NUMBERS or (name == "slice" and whole(arguments, source.shape[arguments["dim"]]))
    if not same:
        return replace(origins, least=_least(name, arguments, of))
    exact = source.dtype == out.dtype or (source.dtype is torch.int32 and out.dtype is torch.int64)
    cast = source if name in _CASTS and exact else None
    if source.dtype.is_floating_point and source.dtype != out.dtype:
        return origins  # the cast may round
    return replace(origins, least=of(source).least, ends=of(source).ends, cast_of=cast)


def _least(name: str, arguments: Mapping[str, Any], of: Callable[[Tensor], Origins]) -> int | None:
    """Return a known lower bound of an integer result."""
    bound: int | None = of(arguments["self"]).least
    other, low = arguments.get("other"), arguments.get("min")
    if name in ("clamp", "clamp_min") and type(low) is int and arguments.get("max") is None:
        return low if bound is None else max(low, bound)
    if bound is None or type(other) is not int or arguments.get("alpha", 1) != 1:
        return None
    return bound + other if name == "add" else bound - other if name == "sub" else None
