"""What a graph's inputs and outputs are to the parameters and to the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.capture.captured import SAMPLE_DIM, Captured
from fxgrad.capture.shared_memory import Write, Writes
from fxgrad.errors import UniformOutput
from fxgrad.graph.context import source_line
from fxgrad.graph.edit import outputs_of
from fxgrad.host.dynamo import as_it_is
from fxgrad.kernels.precision import TOLERANCE
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE, FAKE, TRACED
from fxgrad.ops.values import memory, tensors_of
from fxgrad.ops.written import tensors_written, writers_by_memory
from fxgrad.samples.batch import LOST, SHARED
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a compiled graph, by position: read off while the passes' notes are there."""

    trainable: Mapping[str, int]  # inputs: the trainable parameters
    frozen: Mapping[int, str]  # inputs: parameters that were not trainable, where there may be graph breaks
    dims: Mapping[int, int]  # inputs: the sample dimensions
    packed: Mapping[int, tuple[int, int] | None]  # inputs: of packed sequences, as `Captured.packed` has them
    writes: Writes | None  # the inputs that the graph writes to; None if it writes to none
    uniform: Sequence[int]  # outputs: those that depend on trainable parameters and on no sample
    batched: Mapping[int, Layout]  # outputs: where those that hold the samples have them
    roles: Mapping[int, int]  # outputs: where a later graph, behind a graph break, finds the samples
    tolerance: float  # by the coarsest dtype that the graph computes in


def interface_of(captured: Captured, gm: fx.GraphModule, single: fx.GraphModule | None) -> Interface:
    """Read off what a graph's callers have to know; ``single``: of one sample, the user's."""
    samples = _samples(gm)
    layouts = {i: one.layout for i, one in samples.items()}
    dtypes = {value.dtype for node in gm.graph.nodes for value in tensors_of(FAKE.get(node))}
    return Interface(
        captured.trainable,
        captured.frozen,
        captured.dims,
        captured.packed,
        input_writes(captured, gm),
        _uniform(gm, samples) if single is None else _reached_by_parameters_alone(captured, single),
        {i: layout for i, layout in layouts.items() if layout is not None},
        {} if captured.single or captured.fullgraph else output_roles(gm),
        max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0),
    )


def _samples(gm: fx.GraphModule) -> dict[int, Samples]:
    """Return what each output is to the samples, where the passes know."""
    known = {i: SAMPLES.get(node) for i, node in enumerate(outputs_of(gm)) if isinstance(node, fx.Node)}
    return {i: samples for i, samples in known.items() if isinstance(samples, Samples)}


def _uniform(gm: fx.GraphModule, samples: Mapping[int, Samples]) -> list[int]:
    outputs = outputs_of(gm)
    return [i for i, one in samples.items() if one.kind is Kind.UNIFORM and TRACED.get(outputs[i], True)]


def output_roles(gm: fx.GraphModule) -> dict[int, int]:
    """Output position -> where a later graph, behind a graph break, finds the samples in it."""
    roles = {}
    for i, samples in _samples(gm).items():
        if samples.kind is Kind.BATCHED and samples.layout is not None and not samples.layout.merged:
            roles[i] = samples.layout.dim
        else:
            roles[i] = LOST if samples.kind in (Kind.BATCHED, Kind.MIXED) else SHARED
    return roles


def input_writes(captured: Captured, gm: fx.GraphModule) -> Writes | None:
    """Read off which inputs a graph writes to; None if none."""
    writers = writers_by_memory(gm.graph)
    inputs = gm.graph.find_nodes(op="placeholder")[: len(captured.placeholders)]  # others come behind
    places = {i: memory(node) for i, node in enumerate(inputs) if memory(node) is not None}
    first = {i: writers[place][0] for i, place in places.items() if place in writers}
    by_input = {i: Write(op_name(node.target), source_line(node)) for i, node in first.items()}
    return Writes(by_input, [captured.described(i) for i in range(len(inputs))]) if by_input else None


def _reached_by_parameters_alone(captured: Captured, gm: fx.GraphModule) -> list[int]:
    """Return the uniform outputs for a batch of one, whose graph says nothing about samples."""
    held, traced = _reached(captured, gm)
    return [i for i, node in enumerate(outputs_of(gm)) if node in traced and node not in held]


def adds_parameters(captured: Captured, gm: fx.GraphModule, loss: int) -> fx.Node | None:
    """Return the op by which a loss of one sample gets a term of parameters alone; None where there is none.

    A sum over samples is a number. So a term that is added to it, behind which there is none of the sample's values,
    belongs to no sample, for one as for several.
    """
    held, traced = _reached(captured, gm)
    stack: list[fx.Node] = [outputs_of(gm)[loss]]
    seen = set(stack)
    while stack:
        node = stack.pop()
        operands = node.all_input_nodes
        if any(_size(one) != 0 for one in operands):
            continue
        if any(one in traced and one not in held for one in operands):
            return node
        stack += [one for one in operands if one not in seen]
        seen.update(operands)
    return None


def _size(node: fx.Node) -> int | None:
    """Return how many dimensions a value has; None of what is no tensor."""
    value = EXAMPLE.get(node)
    return value.dim() if isinstance(value, Tensor) else None


def _reached(captured: Captured, gm: fx.GraphModule) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes behind which the sample's values are, and those behind which trainable parameters are."""
    examples, nodes = captured.examples, gm.graph.find_nodes(op="placeholder")
    held = {nodes[i] for i in captured.inputs if getattr(examples[i], SAMPLE_DIM, None) != SHARED}
    traced = {nodes[i] for i in captured.trainable.values()}
    for node in gm.graph.nodes:
        for reached in (held, traced):
            if reached.intersection(node.all_input_nodes):
                reached.update((node, *_changed(node)))
    return held, traced


def _changed(node: fx.Node) -> list[fx.Node]:
    """Return the values whose memory a node writes to."""
    memories = set(map(memory, tensors_written(node))) - {None}
    return [other for other in node.graph.nodes if memory(other) in memories] if memories else []


class Uniform(torch.autograd.Function):
    """An output of parameters alone: a gradient that arrives belongs to no sample."""

    @staticmethod
    def forward(value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None:
            raise UniformOutput(
                "a gradient arrived at an output of the model that depends on parameters alone: "
                "it belongs to no sample",
                advice="Compute penalties on parameters outside of the model.",
            )
        return None, None
