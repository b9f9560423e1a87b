"""Keep what draws random numbers apart from parameters: a backward cannot draw the same numbers again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from fxgrad.calls import Call, bind
from fxgrad.context import Context
from fxgrad.families import draws
from fxgrad.layouts import Kind, Layout, Samples

# What multiplies its input by noise of its own
_DROPOUTS = frozenset("dropout feature_dropout dropout1d dropout2d dropout3d".split())


def separate_draws(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every value has ``samples``. After: the same; dropout and attention use no parameter where they draw.

    ``dropout(w)`` -> ``w * dropout(ones_like(w))``
    ``scaled_dot_product_attention(q, k, v, w, p)`` -> ``scaled_dot_product_attention(q, k, v, w.expand(B, ..), p)``

    The numbers drawn, and their order, stay the same. Other draws are refused where they meet a parameter.
    """
    for node in list(gm.graph.nodes):
        call: Call | None = node.meta.get("call")
        if call is None or call.inplace or not draws(call) or not isinstance(node.meta["samples"], Samples):
            continue
        samples: Samples = node.meta["samples"]
        if call.op in _DROPOUTS and samples.kind is Kind.UNIFORM:
            _take_noise(node, ctx)
        elif call.op == "scaled_dot_product_attention" and samples.layout is not None:
            for operand in node.all_input_nodes:
                if operand.meta["samples"].kind is Kind.UNIFORM:
                    _hand_out(node, operand, samples.layout, ctx)
    return gm


def _take_noise(node: fx.Node, ctx: Context) -> None:
    """``dropout(w)`` -> ``w * dropout(ones_like(w))``"""
    source = node.meta["call"].arguments["input"]
    samples, constant = node.meta["samples"], Samples(Kind.CONSTANT)
    with node.graph.inserting_before(node):
        ones = node.graph.call_function(torch.ones_like, (source,))
        _leave_facts(ones, torch.ones_like, (source,), constant, node, ctx)
    with node.graph.inserting_after(node):
        product = node.graph.call_function(torch.mul, (source, node))
    node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
    node.replace_input_with(source, ones)
    node.meta.update(fake=node.meta["fake"].detach(), traced=False, samples=constant, call=bind(node))
    _leave_facts(product, torch.mul, (source, node), samples, node, ctx)
    for user in product.users:
        if "call" in user.meta:
            user.meta["call"] = bind(user)


def _hand_out(node: fx.Node, operand: fx.Node, layout: Layout, ctx: Context) -> None:
    """Give every sample a copy of its own of what all share, before the op that draws."""
    place = layout.dim - node.meta["fake"].dim()  # dims line up from the right
    batched = next(n for n in node.all_input_nodes if n.meta["samples"].kind is Kind.BATCHED)
    graph, fake = node.graph, operand.meta["fake"]
    with graph.inserting_before(node):
        size = graph.call_function(torch.ops.aten.sym_size.int, (batched, batched.meta["samples"].layout.dim))
        size.meta.update(fake=batched.meta["fake"].shape[size.args[1]], traced=False, samples=None)
        size.meta["call"] = bind(size)
        sizes: list[Any] = [-1] * max(fake.dim(), -place)
        sizes[place] = size
        for dim in range(len(sizes) - fake.dim()):
            sizes[dim] = size if dim == len(sizes) + place else 1
        copies = graph.call_method("expand", (operand, *sizes))
    given = [size.meta["fake"] if value is size else value for value in sizes]
    handed_out = Samples(Kind.BATCHED, layout.at(len(sizes) + place), traced=operand.meta["traced"])
    _leave_facts(copies, Tensor.expand, (operand, *given), handed_out, node, ctx)
    node.replace_input_with(operand, copies)
    node.meta["call"] = bind(node)


def _leave_facts(
    made: fx.Node, function: Callable[..., Any], args: tuple[Any, ...], samples: Samples, node: fx.Node, ctx: Context
) -> None:
    """What the earlier passes would have found out about a new node."""
    values = [arg.meta["fake"] if isinstance(arg, fx.Node) else arg for arg in args]
    with torch.enable_grad(), ctx.symbols.mode, enable_python_dispatcher():
        fake = function(*values)
    made.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    made.meta.update(fake=fake, traced=samples.traced, samples=samples)
    made.meta["call"] = bind(made)
