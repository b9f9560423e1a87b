"""Let a tensor that an op returns as it is keep its name."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context, without_gradients
from fxgrad.host.ops import HigherOrderOperator
from fxgrad.host.tensors import identity
from fxgrad.ops.calls import bind, op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.written import tensors_written


def unite_names(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: what an op returns as it is, or copies, is seen.

    ``h = dropout(x, 0.5, training=False); h.mul_(2)`` -> ``x.mul_(2)``. PyTorch's decomposition, by which values and
    shapes are known here, returns a copy: nothing would say that the op in place writes into x.
    ``with no_grad(): c = h.contiguous()``, where c is h -> h, through which gradients flow.
    ``h @= w`` -> ``h @ w``: both are a new tensor, but the code that fx writes for the first gives h its name.
    """
    stopped, first = without_gradients(gm.graph), dict[int, fx.Node]()
    for node in list(gm.graph.nodes):
        if node.target is operator.imatmul:
            node.target = operator.matmul
        if op_name(node.target) == "native_dropout":
            _drop_native_dropout(node)
        example = EXAMPLE.get(node)
        name = returned_as_it_is(node)
        if name is None and isinstance(example, Tensor):
            name = first.setdefault(identity(example), node)
            name = None if name is node or node not in stopped else name
        if name is not None:
            node.replace_all_uses_with(name)
            if not isinstance(node.target, HigherOrderOperator) and not tensors_written(node):
                gm.graph.erase_node(node)
    return gm


def returned_as_it_is(node: fx.Node) -> fx.Node | None:
    """Return the argument that a node returns as it is, if that is known: of a dropout that is off, and of ``lift``."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = op_name(node.target)
    if name == "lift":
        same: fx.Node = bind(node).arguments["input"]
        return same
    if name not in ("dropout", "dropout_"):
        return None
    call = bind(node)
    off = call.get("p") == 0 or call.get("training", call.get("train")) is False
    return call.arguments["input"] if off else None


def _drop_native_dropout(node: fx.Node) -> None:
    """``torch.native_dropout(x, p, False)`` -> ``x.clone(), ones_like(x)``: its decomposition returns x itself."""
    call = bind(node)
    if call.get("train") is not False or any(user.target is not operator.getitem for user in node.users):
        return
    x = call.arguments["input"]
    for part in list(node.users):
        if part.args[1] == 0:
            part.target, part.args = torch.clone, (x,)
        else:
            part.target, part.args, part.kwargs = torch.ones_like, (x,), {"dtype": torch.bool}
    node.graph.erase_node(node)
