"""What a row has one of is computed once for it, and not for each of its numbers.

Inductor writes sums to memory, and puts what is computed of them into each loop that reads it. Where a loop goes over a
row's numbers, it takes the root in a layer norm's 1/σ for each vector of them: the C++ compiler cannot move it out of
the loop, which writes to memory that might be the sum's.

    var = x.var(-1, keepdim=True)                 [.., 1]
    rstd = rsqrt(var + eps)                       [.., 1]   written to memory
    y = (x - mean) * rstd                         [.., n]

A backward reads what its forward has saved, so this is for one graph of a whole step, and for what a backward computes
again.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, fx

from fxgrad.host.layouts import write_as_inferred
from fxgrad.host.ops import OpOverload
from fxgrad.ops.calls import op_name
from fxgrad.ops.tags import is_pointwise
from fxgrad.terms import is_one

_SLOW = frozenset("rsqrt sqrt reciprocal exp log".split())
_VIEWS = frozenset("view _unsafe_view reshape unsqueeze squeeze expand permute transpose t".split())
_FEW = 8  # numbers of a row from which writing one for it pays


def write_rows(gm: fx.GraphModule) -> None:
    """Mark in a traced graph, before Inductor lowers it, what its loops would compute for each number of a row."""
    slow: set[fx.Node] = set()  # what a loop that reads it would compute slowly
    for node in gm.graph.nodes:
        if not is_pointwise(node) or not (_is_slow(node) or slow.intersection(node.all_input_nodes)):
            continue
        if _is_spread(node):
            write_as_inferred(node)
        else:
            slow.add(node)


def _is_slow(node: fx.Node) -> bool:
    """Return whether an op takes longer than to read a number; ``pow`` by a whole exponent is made of products."""
    name = op_name(node.target)
    return name in _SLOW or (name == "pow" and not (isinstance(node.args[1], int) or node.args[1] == 2.0))


def _is_spread(node: fx.Node) -> bool:
    """Return whether a reader needs each number of a node's value several times, also through views."""
    for user in node.users:
        value, other = node.meta.get("val"), user.meta.get("val")
        if not isinstance(user.target, OpOverload) or not isinstance(value, Tensor) or not isinstance(other, Tensor):
            continue
        name = op_name(user.target)
        if (name == "expand" or is_pointwise(user)) and _is_broader(other, value):
            return True
        if name in _VIEWS and _is_spread(user):
            return True
    return False


def _is_broader(other: Tensor, value: Tensor) -> bool:
    """Return whether each of a value's numbers, of which there are several, is at `_FEW` places or more of another."""
    sizes: list[Any] = [1] * (other.dim() - value.dim()) + [*value.shape]
    new = [size for size, before in zip(other.shape, sizes, strict=True) if is_one(before) and not is_one(size)]
    several = not all(map(is_one, sizes))
    return several and (not all(isinstance(size, int) for size in new) or math.prod(new) >= _FEW)
