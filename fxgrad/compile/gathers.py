"""Units of FSDP2 that a graph gathers itself, where it first uses one of their parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fxgrad.capture.captured import Captured
from fxgrad.capture.sharded_sums import ClippedByUnit
from fxgrad.capture.shared_memory import Writes
from fxgrad.errors import OptionError
from fxgrad.graph.context import source_line
from fxgrad.kernels.gathering import layout_of
from fxgrad.ops.facts import FAKE
from fxgrad.quantities.base import Quantity
from fxgrad.samples.layouts import SAMPLES, WITH_SAMPLES, Samples


def gather_units(gm: fx.GraphModule, captured: Captured, quantities: Sequence[Quantity], writes: Writes | None) -> None:
    """Read gathered values in place of the parameters of every unit that the graph is to gather."""
    clip = next((one for one in quantities if isinstance(one, ClippedByUnit)), None)
    if clip is None or not clip.in_graph:
        return
    inputs = gm.graph.find_nodes(op="placeholder")
    units: dict[int, list[tuple[int, fx.Node]]] = {}
    for i in captured.parameters:
        unit, place = clip.places.get(captured.names[i], (-1, 0))
        assert unit in clip.in_graph or not _is_freed(captured.examples[i]), captured.names[i]
        if unit in clip.in_graph and writes is not None and i in writes.by_input:
            raise OptionError(
                f"forward writes to parameter '{captured.names[i]}', and FSDP2 would forget it",
                where=source_line(next(iter(inputs[i].users), inputs[i])),
                advice="Make it a buffer.",
            )
        if unit in clip.in_graph and inputs[i].users:
            units.setdefault(unit, []).append((place, inputs[i]))
    layouts = {inputs[i]: partial(layout_of, captured.examples[i]) for i in captured.parameters}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for unit, ones in units.items():
        places, wholes = [place for place, _ in ones], [node for _, node in ones]
        first = min((user for node in wholes for user in node.users), key=order.__getitem__)
        users = [(user, node) for node in wholes for user in node.users]
        with gm.graph.inserting_before(first):
            after = _tagged(gm.graph.call_method("detach", (_just_before(first, inputs),)))
            args = (after, [one for node in wholes for one in layouts[node]()], clip.receiver, unit, places)
            gathered = _tagged(gm.graph.call_function(torch.ops.fxgrad.gather_unit.default, args))
            values = {
                node: _tagged(gm.graph.call_function(operator.getitem, (gathered, i))) for i, node in enumerate(wholes)
            }
        for user, node in users:
            user.replace_input_with(node, values[node])
    gm.recompile()


def _is_freed(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0


def _tagged(node: fx.Node) -> fx.Node:
    """Let AOTAutograd compute a value again in the backward, and never save it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 1 << 30  # behind those of the user's checkpoints
    return node


def _just_before(first: fx.Node, inputs: Sequence[fx.Node]) -> fx.Node:
    """Return the value with samples that was computed last before a node."""
    node = first.prev
    while node.op != "root":
        samples = SAMPLES.get(node)
        batched = isinstance(samples, Samples) and samples.kind in WITH_SAMPLES
        if batched and isinstance(FAKE.get(node), Tensor):
            return node
        node = node.prev
    node = first.prev
    while node.op != "root":  # of a batch of one no value has samples
        fake = FAKE.get(node)
        if node.op.startswith("call") and isinstance(fake, Tensor) and fake.dim():
            return node
        node = node.prev
    return next(node for node in inputs if isinstance(FAKE.get(node), Tensor))
