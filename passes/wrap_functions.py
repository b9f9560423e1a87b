"""Make a user's autograd.Function one call whose arguments are values."""

from __future__ import annotations

from torch import fx

from fxgrad.calls import op_name
from fxgrad.context import Context, memory_of, source_line
from fxgrad.errors import UnsupportedOp
from fxgrad.user_functions import UserFunction


def wrap_functions(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no ``autograd_function_apply``, whose bodies are arguments.

    ``autograd_function_apply(fwd, bwd, x, w)`` -> ``autograd_function(x, w)``
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and op_name(node.target) == "higher_order::autograd_function_apply":
            if "saved_for_backward_idx" not in node.kwargs:
                raise UnsupportedOp(
                    "this version of PyTorch hands over an autograd.Function in a form that is not known here",
                    where=source_line(node),
                    advice="Use torch 2.13 or later.",
                )
            fwd, bwd, *args = node.args
            bodies = [getattr(gm, str(body.target)) for body in (fwd, bwd)]
            if "dirty_idx" not in node.kwargs:
                _refuse_writes(bodies[0].graph, source_line(node))
            node.target = UserFunction(bodies[0], bodies[1], node.kwargs)
            node.args, node.kwargs = tuple(args), {}
            for body in (fwd, bwd):
                if not body.users:
                    gm.graph.erase_node(body)
    return gm


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
