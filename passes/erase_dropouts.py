"""Let dropout that is off be its input."""

from __future__ import annotations

from torch import fx

from fxgrad.graph.context import Context
from fxgrad.ops.calls import bind, op_name


def erase_dropouts(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no dropout that returns its input.

    ``h = dropout(x, 0.5, training=False); h.mul_(2)`` -> ``x.mul_(2)``. PyTorch's decomposition, by which values and
    shapes are known here, returns a copy, and nobody would see that the op in place writes into x.
    """
    for node in list(gm.graph.nodes):
        if node.op in ("call_function", "call_method") and op_name(node.target) in ("dropout", "dropout_"):
            call = bind(node)
            if call.get("p") == 0 or call.get("training", call.get("train")) is False:
                node.replace_all_uses_with(call.arguments["input"])
                gm.graph.erase_node(node)
    return gm
