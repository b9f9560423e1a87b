"""What is padded to the longest of its samples: its length depends on all of them, so nothing may work along that.

Elementwise ops, and those over other dimensions, say nothing of the length. A sum does not either where the padding is
zero, nor does an element at a place that counts from the front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.independence.calls import NO_END, Call, Origins
from fxgrad.independence.rules import pointwise
from fxgrad.independence.rules.along import along, dims_of
from fxgrad.independence.rules.registry import Rule

_MOVES = frozenset("transpose t permute unsqueeze squeeze expand view _unsafe_view reshape alias".split())
# of the first operand, rows are worked on alone, with all of the second
_ROWS = {"mm": "mat2", "addmm": "mat2", "bmm": "mat2", "linear": "weight"}
_OF_ZERO = frozenset("neg detach clone _to_copy alias tanh relu sin native_dropout mm".split())  # f(0, ..) = 0
_SAME_NUMBERS = frozenset("detach clone alias _to_copy expand view unsqueeze squeeze transpose".split())


class Padding:
    """The symbols that stand for lengths of longest samples."""

    def __init__(self) -> None:
        self.lengths: set[Any] = set()

    def along(self, size: Any) -> bool:
        """Whether a size is made of such a length."""
        return isinstance(size, torch.SymInt) and not self.lengths.isdisjoint(size.node.expr.free_symbols)

    def held(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and any(map(self.along, tensor.shape))

    def seen(self, call: Call, rule: Rule | None) -> bool:
        """Whether a call may see how long the longest sample is."""
        padded = [tensor for _, tensor in call.tensors() if self.held(tensor)]
        if not padded or call.func.namespace == "fxgrad":
            return False
        kept = all(self.held(out) for out in call.outputs if isinstance(out, Tensor))
        if rule is None or rule.__module__ == pointwise.__name__ or call.name in _MOVES:
            return not kept
        if call.name in _ROWS:
            return not kept or self.held(call.arguments[_ROWS[call.name]])
        if rule is along:
            return self._worked_along(call)
        if call.name in ("select", "slice"):
            return self._over(call, [call.arguments["dim"]]) and not _at_the_front(call)
        if call.name == "gather":  # takes no index that counts from the end
            return False
        if call.name in ("cat", "stack"):
            return self._over(call, [call.arguments["dim"]], call.tensors()[0][1]) and call.name == "cat"
        return not (call.name == "index" and self._from_the_front(call))

    def _over(self, call: Call, dims: Iterable[int], tensor: Tensor | None = None) -> bool:
        tensor = call.arguments["self"] if tensor is None else tensor
        return any(self.along(tensor.shape[dim]) for dim in dims if -tensor.dim() <= dim < tensor.dim())

    def _worked_along(self, call: Call) -> bool:
        source = call.arguments.get("self", call.arguments.get("input"))
        if source is None or not self._over(call, dims_of(call, source.dim()), source):
            return source is None
        return not (call.name == "sum" and call.origins(source).zero_padded)

    def _from_the_front(self, call: Call) -> bool:
        """Whether no index along such a length may count from its end."""
        source, indices = call.arguments["self"], call.arguments["indices"]
        at = [one for dim, one in enumerate(indices) if one is not None and self.along(source.shape[dim])]
        known = [call.origins(one).least for one in at]
        return all(one is not None and one >= 0 for one in known)


def _at_the_front(call: Call) -> bool:
    """``x[0]``, ``x[:]``, ``x[:1]``"""
    if call.name == "select":
        return type(call.arguments["index"]) is int and call.arguments["index"] == 0
    start, end = call.arguments["start"], call.arguments["end"]
    return start in (0, None) and (end is None or (type(end) is int and (end == 1 or end >= NO_END)))


def zero_padded(name: str, operands: Sequence[Origins]) -> bool:
    """Whether padding is zero in a result, too."""
    zero = [one.zero_padded for one in operands]
    if name == "mul":
        return any(zero)
    if name in _OF_ZERO or name in _MOVES:
        return zero[0]
    return name == "add" and len(zero) == 2 and all(zero)


def least(name: str, arguments: Mapping[str, Any], of: Callable[[Tensor], Origins]) -> int | None:
    """The least value that an integer result is known to have."""
    source = arguments.get("self")
    if not isinstance(source, Tensor) or source.is_floating_point():
        return None
    own: int | None = of(source).least
    other = arguments.get("other")
    if name in _SAME_NUMBERS:
        return own
    low = arguments.get("min")
    if name in ("clamp", "clamp_min") and type(low) is int and arguments.get("max") is None:
        return low if own is None else max(low, own)
    if own is None or type(other) is not int or arguments.get("alpha", 1) != 1:
        return None
    return own + other if name == "add" else own - other if name == "sub" else None
