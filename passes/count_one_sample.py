"""A batch of one: all that depends on an input is the sample's, wherever it stands."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fxgrad.errors import MixedSamples
from fxgrad.graph.context import Context, path_to, source_line
from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.forms import QUERIES, SHAPED_AS
from fxgrad.ops.values import memories, memory
from fxgrad.ops.written import tensors_written
from fxgrad.samples.layouts import SAMPLES, WHOLE, Kind, Samples, last_kind

Kinds = dict[Any, Kind]


def count_one_sample(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: nodes have ``fake`` and ``call``, at batch size 1. After: every tensor value has ``samples``.

    Of a graph of one sample nothing says which of its ones was the batch, and nothing has to: a value is what this
    sample's call sees, as a whole. What is made of parameters alone stays a function of parameters.
    """
    written: Kinds = {}  # what an op in place puts into a memory is there for all its views
    while True:
        before = dict(written)
        kinds = _kinds(gm.graph, ctx, written)
        if written == before:
            break
    for node in gm.graph.nodes:
        if node.op != "output":
            SAMPLES.put(node, _samples(node, kinds.get(node, Kind.CONSTANT)))
            _check_statistics(node, ctx)
    return gm


def _kinds(graph: fx.Graph, ctx: Context, written: Kinds) -> Kinds:
    """Return the kind of every node's value, as far as it is known what is written to each memory."""
    kinds_of_nodes: Kinds = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            sample, parameter = node.name in ctx.sample_dims, node.name in ctx.by_node
            kinds_of_nodes[node] = Kind.UNIFORM if parameter else Kind.BATCHED if sample else Kind.CONSTANT
            continue
        kinds = [kinds_of_nodes[arg] for arg in _read(node)]
        kinds += [written[place] for place in memories(node) if place in written]
        kinds_of_nodes[node] = last_kind(kinds)
        for place in {memory(base) for base in tensors_written(node) if base.name not in ctx.by_node}:
            written[place] = last_kind((written.get(place, Kind.CONSTANT), kinds_of_nodes[node]))
    return kinds_of_nodes


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values the node reads: a size is the same number for all values of a shape."""
    call: Call | None = CALL.get(node)
    if call is None:
        return node.all_input_nodes
    if call.op in QUERIES:
        return []
    shape = call.get("other") if call.op in SHAPED_AS else None
    return [arg for arg in node.all_input_nodes if arg is not shape or arg is call.get("input")]


def _samples(node: fx.Node, kind: Kind) -> Any:
    """Return a value's kind with the whole of it as the sample's; of parameters alone, only what has a gradient."""
    fake, traced = FAKE.of(node), TRACED.get(node)

    def one(value: Any, flows: bool) -> Samples | None:
        if not isinstance(value, Tensor):
            return None
        if kind is Kind.BATCHED:
            return Samples(kind, WHOLE, bool(flows))
        return Samples(Kind.UNIFORM, traced=True) if flows and kind is Kind.UNIFORM else Samples(Kind.CONSTANT)

    if node.op == "placeholder" and kind is Kind.UNIFORM:
        return Samples(Kind.UNIFORM, traced=True)
    if isinstance(fake, tuple | list):
        flows = traced if isinstance(traced, list) else [traced] * len(fake)
        several = [one(value, flow) for value, flow in zip(fake, flows, strict=True)]
        return several if any(several) else None
    return one(fake, bool(traced))


def _check_statistics(node: fx.Node, ctx: Context) -> None:
    """Refuse statistics of the batch, which this sample would share with those that come after it."""
    call: Call | None = CALL.get(node)
    if call is not None and call.op == "batch_norm" and call.get("training") is True and TRACED.of(node):
        raise MixedSamples(
            "batch_norm in training mode lets samples influence each other",
            where=source_line(node),
            path=path_to(node, ctx),
            advice="Use GroupNorm, or put the layer in eval mode.",
        )
