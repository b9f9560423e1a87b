"""Make every stretch of a graph that torch.func's transforms cover one call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from fxgrad.graph.context import Context, place_beside
from fxgrad.graph.edit import function_of, is_inplace

_BEGIN = frozenset("_grad_increment_nesting _vmap_increment_nesting _jvp_increment_nesting _enter_dual_level".split())
_END = frozenset("_grad_decrement_nesting _vmap_decrement_nesting _jvp_decrement_nesting _exit_dual_level".split())
# PyTorch forbids saved-tensor hooks there; what is inside only runs to be traced, under a hook of fxgrad's own
_HOOKS = ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")


class Stretch:
    """The call target that stands for the stretch; decompose_calls writes it in ATen ops, derivatives included."""

    __module__ = "torch.func"
    __name__ = __qualname__ = "torch_func"

    def __init__(self, body: fx.GraphModule) -> None:
        self.body = body

    def __call__(self, *args: Any) -> Any:
        return fx.Interpreter(self.body).run(*args)

    def __repr__(self) -> str:
        return "torch_func"


def wrap_transforms(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no call opens or closes a level of torch.func.

    ``_grad_increment_nesting(); ..; _autograd_grad(..); ..; _grad_decrement_nesting()`` -> ``torch_func(x, w)``
    """
    depth = 0
    inside: list[fx.Node] = []
    derivatives = {node for node in gm.graph.nodes if function_of(node) == "_autograd_grad"}
    for node in list(gm.graph.nodes):
        name = function_of(node)
        if name in _HOOKS:
            gm.graph.erase_node(node)
            continue
        depth += name in _BEGIN
        if depth or inside:
            inside.append(node)
        depth -= name in _END
        derivatives.discard(node)
        if inside and not depth and not any(_reads(later, inside) for later in derivatives):
            _wrap(gm, inside)
            inside = []
    return gm


def _reads(derivative: fx.Node, inside: Sequence[fx.Node]) -> bool:
    """Return whether a derivative, which torch.func.vjp takes behind its level, is one of what is inside."""
    return not set(inside).isdisjoint(derivative.all_input_nodes)


def _wrap(gm: fx.GraphModule, inside: list[fx.Node]) -> None:
    after = inside[-1].next
    parts = [user for node in inside if function_of(node) == "_autograd_grad" for user in node.users]
    inside += [part for part in dict.fromkeys(parts) if part not in inside]
    stretch = set(inside)
    inputs = list(dict.fromkeys(arg for node in inside for arg in node.all_input_nodes if arg not in stretch))
    outputs = [node for node in inside if any(user not in stretch for user in node.users)]
    if not outputs and not any(map(is_inplace, inside)):  # Dynamo leaves levels without a reader
        return _erase(gm, inside)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {arg: graph.placeholder(arg.name) for arg in inputs}
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    with gm.graph.inserting_before(after):
        whole = gm.graph.call_function(Stretch(fx.GraphModule(gm, graph)), tuple(inputs))
        traced = next((node for node in reversed(inside) if node.stack_trace), inside[-1])
        place_beside(traced, whole)
        for i, node in enumerate(outputs):
            value = gm.graph.call_function(operator.getitem, (whole, i))
            value.meta = dict(whole.meta)
            node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in stretch)
    _erase(gm, inside)


def _erase(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    for node in reversed(nodes):
        gm.graph.erase_node(node)
