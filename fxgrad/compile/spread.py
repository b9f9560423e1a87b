"""What is the same number at many places is computed once, and spread behind.

Autograd divides the gradient of a mean where it has spread it. A loop then writes every place of it for an operator,
which would read one number many times as well:

    div(expand(g, [n, k, d]), k)   ->   expand(div(g, k), [n, k, d])

Only what fxgrad's own operators read is changed, as they take values in any layout.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx

from fxgrad.kernels.operators import ANY_LAYOUT, BODIES
from fxgrad.ops.tags import has_tag, is_pointwise

aten = torch.ops.aten
_EXPAND = aten.expand.default


def spread_late(gm: fx.GraphModule) -> None:
    """Change a traced graph, of the forward or of the backward."""
    late: dict[fx.Node, fx.Node] = {}  # a value -> the same, spread behind what is computed
    for node in gm.graph.nodes:
        if node.target in BODIES and all(has_tag(node, tag) for tag in ANY_LAYOUT):
            node.args = fx.map_arg(node.args, lambda value: _spread(value, late))
    for value, same in reversed(late.items()):
        if value is not same and not value.users:
            gm.graph.erase_node(value)
    gm.recompile()


def _spread(value: fx.Node, late: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the same value, spread behind what is computed of it; or the value itself, where it is not spread."""
    if value not in late:
        late[value] = _computed_before(value, late)
    return late[value]


def _computed_before(value: fx.Node, late: dict[fx.Node, fx.Node]) -> fx.Node:
    operand = _only_operand(value)
    spread = operand and _spread(operand, late)
    if operand is None or spread is None or spread.target is not _EXPAND:
        return value
    small = cast("fx.Node", spread.args[0])
    if small.meta["val"].dim() == 0:  # next to another number it might have another dtype
        return value
    graph = value.graph
    with graph.inserting_before(value):
        computed = graph.node_copy(value, lambda one: small if one is operand else one)
        computed.meta["val"] = _run(computed)
        result = graph.call_function(_EXPAND, (computed, *spread.args[1:]))
        result.meta["val"] = _run(result)
    return result


def _only_operand(value: fx.Node) -> fx.Node | None:
    """Return the one operand of a pointwise op that is no single number; None if there are others, or none."""
    if not is_pointwise(value) or value.is_impure():
        return None
    operands = [one for one in value.all_input_nodes if not _is_number(one.meta.get("val"))]
    return operands[0] if len(operands) == 1 else None


def _is_number(value: object) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else value is not None


def _run(node: fx.Node) -> Tensor:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return cast("Tensor", node.target(*args, **kwargs))  # type: ignore[operator]
