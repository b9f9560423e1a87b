"""Make a user's autograd.Function, or an op of control flow, one call whose arguments are values."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxgrad.calls import op_name
from fxgrad.context import Context, memory_of, source_line
from fxgrad.control_flow import CONTROL_FLOW, Cond
from fxgrad.errors import UnsupportedOp
from fxgrad.user_functions import UserFunction


def wrap_bodies(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no call has graphs among its arguments.

    ``autograd_function_apply(fwd, bwd, x, w)`` -> ``autograd_function(x, w)``
    ``scan(body, [h], [x], [w])`` -> ``scan(h, x, w)``
    """
    for node in list(gm.graph.nodes):
        name = op_name(node.target) if node.op == "call_function" else ""
        if name == "higher_order::autograd_function_apply":
            _wrap_function(gm, node)
        elif name in CONTROL_FLOW:
            _wrap_control_flow(gm, node, CONTROL_FLOW[name])
    return gm


def _wrap_function(gm: fx.GraphModule, node: fx.Node) -> None:
    if "saved_for_backward_idx" not in node.kwargs:
        raise UnsupportedOp(
            "this version of PyTorch hands over an autograd.Function in a form that is not known here",
            where=source_line(node),
            advice="Use torch 2.13 or later.",
        )
    fwd, bwd, *args = node.args
    bodies = [fwd, bwd]
    forward, backward = _graphs(gm, bodies)
    if "dirty_idx" not in node.kwargs:
        _refuse_writes(forward.graph, source_line(node))
    node.target = UserFunction(forward, backward, node.kwargs)
    node.args, node.kwargs = tuple(args), {}
    _drop(gm, bodies)


def _refuse_writes(forward: fx.Graph, where: str) -> None:
    """A written input that ``dirty_idx`` does not name: PyTorch's own gradients are wrong where it is read again."""
    inputs = {_memory(node) for node in forward.find_nodes(op="placeholder")} - {None}
    for node in forward.nodes:
        name = op_name(node.target)
        inplace = name.endswith("_") and not name.endswith("__")
        if inplace and node.op.startswith("call_") and node.args and _memory(node.args[0]) in inputs:
            raise UnsupportedOp(
                "an autograd.Function writes over an input, and the captured graph does not say so",
                where=where,
                advice="Call ctx.mark_dirty, with torch 2.13 or later, or write to a copy.",
            )


def _memory(node: object) -> int | None:
    return memory_of(node.meta.get("example_value")) if isinstance(node, fx.Node) else None


def _wrap_control_flow(gm: fx.GraphModule, node: fx.Node, kind: Any) -> None:
    args = [*node.args, *node.kwargs.values()]
    bodies = [arg for arg in args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    bodies = [body for body in bodies if isinstance(getattr(gm, str(body.target)), fx.GraphModule)]
    groups = [list(arg) if isinstance(arg, tuple | list) else [arg] for arg in args if arg not in bodies]
    sizes = [1, len(groups[1])] if kind is Cond else [len(group) for group in groups]
    node.target = kind(_graphs(gm, bodies), sizes)
    node.args, node.kwargs = tuple(arg for group in groups for arg in group), {}
    _drop(gm, bodies)


def _graphs(gm: fx.GraphModule, bodies: Any) -> list[fx.GraphModule]:
    return [getattr(gm, str(body.target)) for body in bodies]


def _drop(gm: fx.GraphModule, bodies: Any) -> None:
    for body in bodies:
        if not body.users:
            gm.graph.erase_node(body)
