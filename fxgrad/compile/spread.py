"""What is the same number at many places is computed once, and spread behind.

Autograd divides the gradient of a mean where it has spread it, and a linear layer's backward multiplies each row of it,
which are alike. A loop then writes every place of it for a product or an operator:

    div(expand(g, [n, k, d]), k)             ->   expand(div(g, k), [n, k, d])
    view(mm(view(expand(g, [n, k, d])), w))  ->   expand(view(mm(view(g), w)), [n, k, e])

A reader gets the spread value only if its own result lies in memory as it did when it was traced: Inductor gives what a
graph returns the strides of the graph that it gets.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxgrad.compile.nodes import call, value_of, with_value
from fxgrad.host.pytree import tree_leaves
from fxgrad.kernels.operators import ANY_LAYOUT, BODIES
from fxgrad.ops.tags import has_tag, is_pointwise

aten = torch.ops.aten
_EXPAND = aten.expand.default
_SUMS = {aten.sum.dim_IntList, aten.sum.default}
_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})


def spread_late(gm: fx.GraphModule) -> None:
    """Change a traced graph, of the forward or of the backward."""
    late: dict[fx.Node, fx.Node] = {}  # a value -> the same, spread behind what is computed of it
    before = {*gm.graph.nodes}
    for node in list(gm.graph.nodes):
        same = node if node.target is _EXPAND else _by_pointwise(node, late) or _by_product(node, late)
        if same is not None and not _may_be_written(node):
            late[node] = same
    for value, same in late.items():
        if value is not same:
            _replace(value, same)
    for node in reversed(gm.graph.nodes):
        if not node.users and (node in late or node not in before or _is_product(node) or _is_view(node)):
            gm.graph.erase_node(node)
    gm.recompile()


def _may_be_written(value: fx.Node) -> bool:
    return any(user.is_impure() for user in value.users if user.op != "output")


def _by_pointwise(value: fx.Node, late: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Return a pointwise op's result of one spread operand and of numbers, computed before it is spread."""
    if not is_pointwise(value) or value.is_impure() or not isinstance(value.meta["val"], Tensor):
        return None
    operands = [one for one in value.all_input_nodes if not _is_number(one.meta.get("val"))]
    spread = late.get(operands[0]) if len(operands) == 1 else None
    if spread is None:
        return None
    if value.target is aten.clone.default:
        return spread
    small, sizes = _parts(spread)
    if small.meta["val"].dim() == 0:  # next to another number it might have another dtype
        return None
    with value.graph.inserting_before(value):
        computed = with_value(value.graph.node_copy(value, lambda one: small if one is operands[0] else one))
        return call(value.graph, _EXPAND, computed, sizes)


def _by_product(value: fx.Node, late: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Return the product of spread rows ``[n, k.., d]``, that are flattened for it, with a matrix, likewise."""
    if not _is_view(value) or not _is_product(_first(value)):
        return None
    product = _first(value)
    flat = _first(product)
    spread = late.get(_first(flat)) if _is_view(flat) else None
    if spread is None:
        return None
    small, sizes = _parts(spread)
    shape = _shape_of_few(*(node.meta["val"] for node in (small, spread, flat, product, value)))
    if shape is None:
        return None
    graph = value.graph
    with graph.inserting_before(value):
        few = call(graph, aten.reshape.default, small, [-1, small.meta["val"].shape[-1]])
        result = call(graph, aten.reshape.default, call(graph, aten.mm.default, few, product.args[1]), shape)
        return call(graph, _EXPAND, result, [*sizes[:-1], -1])


def _is_view(node: fx.Node) -> bool:
    return str(node.target) in _VIEWS


def _is_product(node: fx.Node) -> bool:
    return node.target is aten.mm.default


def _first(node: fx.Node) -> fx.Node:
    return cast("fx.Node", node.args[0])


def _shape_of_few(small: Tensor, rows: Tensor, flat: Tensor, product: Tensor, result: Tensor) -> list[int] | None:
    """Return the shape of a product's result for rows that are not spread yet, with -1 for a size that is no number.

    ``flat`` has to have all rows of ``[n, k.., d]``, spread along others of its dimensions than the last, and the
    result the same dimensions in front.
    """
    if not small.dim() == rows.dim() == result.dim() >= 3:
        return None
    before, behind = ([value.shape[-1] for value in values] for values in ((small, rows, flat), (product, result)))
    if not all(isinstance(width, int) for width in (*before, *behind)) or len({*before}) > 1 or len({*behind}) > 1:
        return None
    alike = all(statically_known_true(a == b) for a, b in zip(rows.shape[:-1], result.shape[:-1], strict=True))
    empty = any(isinstance(size, int) and size == 0 for size in (*rows.shape, *result.shape))
    shape = [size if isinstance(size, int) else -1 for size in (*small.shape[:-1], *behind[:1])]
    return shape if alike and not empty and shape.count(-1) <= 1 else None


def _parts(spread: fx.Node) -> tuple[fx.Node, list[Any]]:
    small, sizes = cast("tuple[fx.Node, list[Any]]", spread.args[:2])
    return small, sizes


def _replace(value: fx.Node, same: fx.Node) -> None:
    """Let readers have the same value in another layout, where that changes nothing about theirs."""
    for user in list(value.users):
        op: Any = aten.reshape.default if _is_view(user) else user.target
        if not (_is_view(user) or _takes_any_layout(user) or is_pointwise(user) or user.target in _SUMS):
            continue
        args, kwargs = fx.map_arg((user.args, user.kwargs), lambda one: same if one is value else one)
        if _lie_alike(value_of(op, args, kwargs), user.meta["val"]):
            user.target = op
            user.replace_input_with(value, same)
        elif _is_view(user):
            with value.graph.inserting_before(user):
                _replace(user, call(value.graph, op, same, *user.args[1:]))


def _lie_alike(one: Any, other: Any) -> bool:
    """Return whether results have the same strides."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    both = ((x.stride(), y.stride()) for x, y in pairs if isinstance(x, Tensor))
    return all(statically_known_true(a == b) for x, y in both for a, b in zip(x, y, strict=True))


def _takes_any_layout(node: fx.Node) -> bool:
    return node.target in BODIES and all(has_tag(node, tag) for tag in ANY_LAYOUT)


def _is_number(value: object) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else value is not None
