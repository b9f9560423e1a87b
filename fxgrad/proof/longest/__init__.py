"""Padded dimensions, op by op: dimensions as long as the longest sample, and their padding.

A padded value has, for each sample, the values of that sample alone, and padding after its end. An op may work on each
step separately, or index steps from the front. It may work along all steps only if the padding changes nothing, such as
zeros in a sum or minus infinity in a softmax. An op without a handler here may see the longest length.
"""

from __future__ import annotations

from torch import Tensor

from fxgrad.proof.calls import Call
from fxgrad.proof.longest import own, places
from fxgrad.proof.longest.along import along
from fxgrad.proof.longest.elements import elementwise
from fxgrad.proof.longest.steps import HANDLERS, Padded, Padding, Seen, Step, held
from fxgrad.proof.rules import pointwise
from fxgrad.proof.rules.along import along as reduction
from fxgrad.proof.rules.registry import Rule

__all__ = ["after", "own", "places"]

_MOVES = frozenset("transpose t permute unsqueeze squeeze expand view _unsafe_view reshape".split())


def after(call: Call, rule: Rule | None, padding: Padding) -> list[Padded]:
    """Return the padded dimensions of each output; raise `Seen` if the call may see the longest length."""
    tensors = [tensor for _, tensor in call.tensors]
    outputs = [out for out in call.outputs if isinstance(out, Tensor)]
    if any(padding.along(size) for tensor in (*tensors, *outputs) for size in tensor.shape):
        return _along_steps(Step(call, padding), rule)
    if _counts(call, rule, padding, outputs):
        raise Seen
    return [{} for _ in call.outputs]


def _along_steps(step: Step, rule: Rule | None) -> list[Padded]:
    handler = HANDLERS.get(step.name)
    if handler is None and _is_elementwise(rule):
        handler = elementwise
    elif handler is None and rule is reduction:
        handler = along
    if handler is None:
        raise Seen
    try:
        padded = handler(step)
    except (RuntimeError, ValueError, IndexError, KeyError):
        raise Seen from None
    pairs = list(zip(step.call.outputs, padded, strict=True))
    if any(isinstance(out, Tensor) and steps.keys() != set(step.dims(out)) for out, steps in pairs):
        raise Seen
    return [{dim: held(one, out.dtype) for dim, one in steps.items()} for out, steps in pairs]


def _is_elementwise(rule: Rule | None) -> bool:
    return rule is not None and rule.__module__ == pointwise.__name__


def _counts(call: Call, rule: Rule | None, padding: Padding, outputs: list[Tensor]) -> bool:
    """Decide whether a call may count the rows of packed data, as in a sum over a constant of that size."""
    tensors = [tensor for _, tensor in call.tensors]
    if call.is_own or not any(map(padding.of_rows, tensors)):
        return False
    kept = all(map(padding.of_rows, outputs))
    if all(call.facts.of(tensor).alone for tensor in tensors):
        return not (kept and (_is_elementwise(rule) or call.name in _MOVES))
    mean = call.name == "mean" or call.arguments.get("reduction") == 1
    return call.facts.clips and mean and not kept
