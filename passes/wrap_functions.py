"""Make a user's autograd.Function one call whose arguments are values."""

from __future__ import annotations

from torch import fx

from fxgrad.calls import op_name
from fxgrad.context import Context, source_line
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
            node.target = UserFunction(bodies[0], bodies[1], node.kwargs)
            node.args, node.kwargs = tuple(args), {}
            for body in (fwd, bwd):
                if not body.users:
                    gm.graph.erase_node(body)
    return gm
