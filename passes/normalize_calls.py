"""Give every call one name and one form, whatever spelling the user chose."""

from __future__ import annotations

from torch import fx

from fxgrad.graph.context import Context
from fxgrad.ops.calls import CALL, bind


def normalize_calls(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: nodes have ``fake``. After: every call has ``call``; targets stay as they are.

    ``x + w``, ``torch.add(x, w)``, ``x.add(w)`` -> ``Call("add", {"input": x, "other": w})``. The native
    call is left alone, so that the forward stays the user's, bit for bit. What an op in place writes to is its first
    argument by place: ``relu(input=x, inplace=True)`` -> ``relu(x, inplace=True)``.
    """
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            call = bind(node)
            if call.inplace and not node.args:
                place = next(iter(call.arguments.values()))
                node.args, node.kwargs = (place,), {key: arg for key, arg in node.kwargs.items() if arg is not place}
            CALL.put(node, call)
    return gm
