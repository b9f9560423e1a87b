"""What a graph's outputs are to the samples: of parameters alone, or where a later graph finds the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.capture.captured import SAMPLE_DIM, Captured
from fxgrad.errors import UniformOutput
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE, TRACED
from fxgrad.ops.values import memory_of
from fxgrad.samples.batch import LOST, SHARED
from fxgrad.samples.layouts import SAMPLES, Kind, Samples


def uniform_outputs(gm: fx.GraphModule) -> list[int]:
    """The outputs that depend on trainable parameters and on no sample."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    found = []
    for i, node in enumerate(outputs):
        samples = SAMPLES.get(node) if isinstance(node, fx.Node) else None
        if isinstance(samples, Samples) and samples.kind is Kind.UNIFORM and TRACED.get(node, True):
            found.append(i)
    return found


def reached_by_parameters_alone(captured: Captured) -> list[int]:
    """The same for a batch of one, whose graph says nothing about samples."""
    held = {
        captured.placeholders[i] for i in captured.inputs() if getattr(captured.examples[i], SAMPLE_DIM, None) != SHARED
    }
    traced = {captured.placeholders[i] for i in captured.trainable()}
    for node in captured.gm.graph.nodes:
        for reached in (held, traced):
            if reached.intersection(node.all_input_nodes):
                reached.update((node, *_written(node)))
    outputs = captured.gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    return [i for i, node in enumerate(outputs) if node in traced and node not in held]


def _written(node: fx.Node) -> list[fx.Node]:
    """The earlier values whose memory an op in place writes to."""
    base = node.args[0] if node.args else None
    if node.op not in ("call_function", "call_method") or not isinstance(base, fx.Node):
        return []
    memory = _memory(base) if op_name(node.target).endswith("_") else None
    return [other for other in node.graph.nodes if memory is not None and _memory(other) == memory]


def _memory(node: fx.Node) -> int | None:
    """A value's memory as Dynamo saw it; None inside torch.func, whose wrappers have none."""
    try:
        return memory_of(EXAMPLE.get(node))
    except NotImplementedError:
        return None


def output_roles(gm: fx.GraphModule) -> dict[int, int]:
    """Output position -> where a later graph, behind a graph break, finds the samples in it."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    roles = {}
    for i, node in enumerate(outputs):
        samples = SAMPLES.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(samples, Samples):
            continue
        if samples.kind is Kind.BATCHED and samples.layout is not None and not samples.layout.merged:
            roles[i] = samples.layout.dim
        else:
            roles[i] = LOST if samples.kind in (Kind.BATCHED, Kind.MIXED) else SHARED
    return roles


class Uniform(torch.autograd.Function):
    """An output of parameters alone: a gradient that arrives belongs to no sample."""

    @staticmethod
    def forward(value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None:
            raise UniformOutput(
                "a gradient arrived at an output of the model that depends on parameters alone: "
                "it belongs to no sample",
                advice="Compute penalties on parameters outside of the model.",
            )
        return None, None
