"""Keep what draws random numbers apart from parameters: a backward cannot draw the same numbers again."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxgrad.graph.context import Context
from fxgrad.graph.edit import bind_again, make
from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.facts import FAKE, TRACED, put_facts
from fxgrad.ops.families import draws
from fxgrad.samples.layouts import SAMPLES, WHOLE, Kind, Layout, Samples, kind_of, layout_of, samples_of

# What multiplies its input by noise of its own
_DROPOUTS = frozenset("dropout feature_dropout dropout1d dropout2d dropout3d".split())


def separate_draws(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every value has ``samples``. After: the same; dropout and attention use no parameter where they draw.

    ``dropout(w)`` -> ``w * dropout(ones_like(w))``
    ``scaled_dot_product_attention(q, k, v, w, p)`` -> ``scaled_dot_product_attention(q, k, v, w.expand(B, ..), p)``

    The numbers drawn, and their order, stay the same. Other draws are refused where they meet a parameter.
    """
    for node in list(gm.graph.nodes):
        call: Call | None = CALL.get(node)
        samples = SAMPLES.get(node)
        if call is None or call.inplace or not draws(call) or not isinstance(samples, Samples):
            continue
        if call.op in _DROPOUTS and samples.kind is Kind.UNIFORM:
            _take_noise(node, ctx)
        elif call.op == "scaled_dot_product_attention" and samples.layout is not None:
            for operand in node.all_input_nodes:
                if kind_of(operand) is Kind.UNIFORM:
                    _hand_out(node, operand, samples.layout, ctx)
    return gm


def _take_noise(node: fx.Node, ctx: Context) -> None:
    """``dropout(w)`` -> ``w * dropout(ones_like(w))``"""
    source, graph = CALL.of(node).arguments["input"], node.graph
    samples, constant = samples_of(node), Samples(Kind.CONSTANT)
    with graph.inserting_before(node):
        ones = make(graph, ctx, torch.ones_like, (source,), beside=node)
    with graph.inserting_after(node):
        product = make(graph, ctx, torch.mul, (source, node), beside=node)
    node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
    node.replace_input_with(source, ones)
    for new, known in ((ones, constant), (node, constant), (product, samples)):
        put_facts(new, {SAMPLES: known, TRACED: known.traced})
    FAKE.put(node, FAKE.of(node).detach())
    bind_again([node, product, *product.users])


def _hand_out(node: fx.Node, operand: fx.Node, layout: Layout, ctx: Context) -> None:
    """Give every sample a copy of its own of what all share, before the op that draws."""
    with node.graph.inserting_before(node):
        if layout is WHOLE:
            copies = make(node.graph, ctx, "clone", (operand,), beside=node)
        else:
            copies, layout = _expanded(node, operand, layout, ctx)
    traced = TRACED.of(operand)
    put_facts(copies, {SAMPLES: Samples(Kind.BATCHED, layout, traced=traced), TRACED: traced})
    node.replace_input_with(operand, copies)
    bind_again([node])


def _expanded(node: fx.Node, operand: fx.Node, layout: Layout, ctx: Context) -> tuple[fx.Node, Layout]:
    """Copies for all samples, and the place of the samples in them."""
    place = layout.dim - FAKE.of(node).dim()  # dims line up from the right
    batched, dim = next((n, at.dim) for n in node.all_input_nodes if (at := layout_of(n)) is not None)
    graph, fake = node.graph, FAKE.of(operand)
    size = make(graph, ctx, torch.ops.aten.sym_size.int, (batched, dim), beside=node)
    SAMPLES.put(size, None)
    sizes: list[Any] = [-1] * max(fake.dim(), -place)
    sizes[place] = size
    for dim in range(len(sizes) - fake.dim()):
        sizes[dim] = size if dim == len(sizes) + place else 1
    return make(graph, ctx, "expand", (operand, *sizes), beside=node), layout.at(len(sizes) + place)
