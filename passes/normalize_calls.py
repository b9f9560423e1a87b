"""Give every call one name and one form, whatever spelling the user chose."""

from __future__ import annotations

from torch import fx

from fxgrad.graph.context import Context
from fxgrad.ops.calls import CALL, bind


def normalize_calls(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: nodes have ``fake``. After: every call has ``call``; targets and args stay as they are.

    ``x + w``, ``torch.add(x, w)``, ``x.add(w)`` -> ``Call("add", {"input": x, "other": w})``. The native
    call is left alone, so that the forward stays the user's, bit for bit.
    """
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            CALL.put(node, bind(node))
    return gm
