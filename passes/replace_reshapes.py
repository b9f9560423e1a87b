"""Let what an op changes the shape of in place be a new value."""

from __future__ import annotations

from torch import fx

from fxgrad.errors import UnsupportedOp
from fxgrad.graph.context import Context, source_line
from fxgrad.graph.edit import is_inplace
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE

_RESHAPES = frozenset("unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_".split())
_MAY_BE_ITSELF = frozenset("contiguous to float double half bfloat16 type type_as cpu cuda requires_grad_".split())


def replace_reshapes(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no value of the graph changes its shape.

    ``h.t_(); y = h @ w`` -> ``t = h.t(); y = t @ w``, with ``t`` a view of the same memory. An input of the model
    changes for its caller as well, so it stays. What ``contiguous`` may give back as it is, is refused.
    """
    nodes = list(gm.graph.nodes)
    for i, node in enumerate(nodes):
        if node.op not in ("call_function", "call_method") or op_name(node.target) not in _RESHAPES:
            continue
        same = _same(node)
        if same[-1].op == "placeholder":
            continue
        other = next((user for value in same for user in value.users if _may_be_itself(user)), None)
        if other is not None:
            _refuse(node, other)
            continue
        node.op, node.target = "call_method", op_name(node.target).removesuffix("_")
        later = set(nodes[i + 1 :])
        others = [value for value in nodes[:i] if _same(value)[-1] is same[-1]]
        for value in others:
            value.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return gm


def _refuse(node: fx.Node, other: fx.Node) -> None:
    """Where a gradient arrives: constants may change as they like."""
    if getattr(EXAMPLE.get(node), "requires_grad", True):
        raise UnsupportedOp(
            f"{op_name(node.target)} changes the shape of a tensor that {op_name(other.target)} may give back as it is",
            where=source_line(node),
            advice=f"Use {op_name(node.target).removesuffix('_')}, which returns a view.",
        )


def _may_be_itself(user: fx.Node) -> bool:
    return user.op in ("call_function", "call_method") and op_name(user.target) in _MAY_BE_ITSELF


def _same(node: fx.Node) -> list[fx.Node]:
    """A value, and those that ops in place got it from: one tensor under several names."""
    values = [node]
    while is_inplace(values[-1]):
        source = values[-1].args[0] if values[-1].args else None
        if not isinstance(source, fx.Node):
            break
        values.append(source)
    return values
