"""Let what an op changes the shape of in place be a new value."""

from __future__ import annotations

from torch import fx

from fxgrad.errors import UnsupportedOp
from fxgrad.graph.context import Context, source_line, without_gradients
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.values import names_of

_RESHAPES = frozenset("unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_ detach_".split())


def replace_reshapes(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no value of the graph changes its shape.

    ``h.t_(); y = h @ w`` -> ``t = h.t(); y = t @ w``, with ``t`` a view of the same memory, which is read in place of
    every name of h. An input of the model changes for its caller as well, so it stays.
    """
    stopped = without_gradients(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "call_method") or op_name(node.target) not in _RESHAPES:
            continue
        names = [name for name in names_of(node) if name < node]
        if any(name.op == "placeholder" for name in names):
            continue
        if node in stopped and getattr(EXAMPLE.get(node), "requires_grad", True):
            raise UnsupportedOp(
                f"{op_name(node.target)} changes the shape of a value without its gradient's, under torch.no_grad",
                where=source_line(node),
                advice=f"Use {op_name(node.target).removesuffix('_')}, which returns a view.",
            )
        node.op, node.target = "call_method", op_name(node.target).removesuffix("_")
        for name in names:
            name.replace_all_uses_with(node, delete_user_cb=node.__lt__)
    return gm
