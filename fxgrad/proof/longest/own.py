"""Padded dimensions of fxgrad's operators on sequences, which run over each sample by its length."""

from __future__ import annotations

from torch import Tensor

from fxgrad.proof.longest.steps import Padded, Seen, Step, Steps, expr, filled, steps_of


@steps_of("fxgrad::pack fxgrad::repack fxgrad::packed_lengths fxgrad::pad_packed_to_longest")
def _packed(step: Step) -> list[Padded]:
    """Read only the steps that each sample has; `Follow` records the padding of `pad_packed_to_longest`."""
    return [{dim: Steps(expr(out.shape[dim])) for dim in step.dims(out)} for out in step.call.outputs]


@steps_of("fxgrad::pad_packed")
def _pad_packed(step: Step) -> list[Padded]:
    """Pad to the length of a longest sample, or to a length that no sample determines."""
    (out,) = step.call.outputs
    if not step.dims(out):
        return [{}]
    if step.dims(out) != [0]:
        raise Seen
    return [{0: filled(step.new(out.shape[0]), float(step.call.arguments["value"]))}]


@steps_of("fxgrad::recurrence")
def _recurrence(step: Step) -> list[Padded]:
    """Follow ``x [T, B, in] -> hs [T + 1, B, H]``; after a sample's end its state stays the same."""
    step.only("x")
    x = step.call.arguments["x"]
    if not step.call.has("lengths") or list(step.of(x)) != [0] or not step.lengths.lone(x.shape[0]):
        raise Seen
    finite, forward = step.of(x)[0].safe, not step.call.arguments["reverse"]
    padded = []
    for i, out in enumerate(step.call.outputs):
        steps = {dim: Steps(expr(out.shape[dim]), finite=finite, stays=forward and i == 0) for dim in step.dims(out)}
        if isinstance(out, Tensor) and not steps.keys() <= {0}:
            raise Seen
        padded.append(steps)
    return padded


@steps_of("fxgrad::grouped_rows")
def _grouped_rows(step: Step) -> list[Padded]:
    """Multiply each row separately."""
    step.only("input", "ids")
    return [{dim: one.unknown() for dim, one in step.of(step.call.arguments["input"]).items() if dim == 0}]
