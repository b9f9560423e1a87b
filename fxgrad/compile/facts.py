"""What the check of the first batch reads off a graph while the passes' notes are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxgrad.kernels.precision import TOLERANCE
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE
from fxgrad.ops.values import memory_of, tensors_of
from fxgrad.ops.written import written_to
from fxgrad.samples.layouts import SAMPLES, Layout, Samples


@dataclass(frozen=True)
class Facts:
    """What a graph's nodes say about its inputs and outputs, beside `Transformed`'s own."""

    packed: Mapping[int, tuple[int, int] | None]  # inputs of packed sequences, as `Captured.packed` has them
    batched: Mapping[int, Layout]  # outputs that hold the samples, and where
    written: frozenset[int]  # inputs that the graph writes to
    tolerance: float  # by the coarsest dtype that the graph computes in


def facts_of(gm: fx.GraphModule, packed: Mapping[int, tuple[int, int] | None]) -> Facts:
    """Read off what the check has to know while the passes' notes are there."""
    nodes = list(gm.graph.nodes)
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    known = [SAMPLES.get(node) if isinstance(node, fx.Node) else None for node in outputs]
    batched = {i: one.layout for i, one in enumerate(known) if isinstance(one, Samples) and one.layout is not None}
    memories = {
        memory_of(FAKE.of(place)) for node in nodes if CALL.on(node) for place in written_to(node, CALL.of(node))
    }
    inputs = enumerate(node for node in nodes if node.op == "placeholder")
    written = [i for i, node in inputs if memory_of(FAKE.get(node)) in memories - {None}]
    dtypes = {value.dtype for node in nodes for value in tensors_of(FAKE.get(node))}
    tolerance = max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return Facts(packed, batched, frozenset(written), tolerance)
