"""Padded dimensions, op by op: dimensions as long as the longest sample, and their padding.

A padded value has, for each sample, the values of that sample alone, and padding after its end. An op may work on each
step separately, or index steps from the front. It may work along all steps only if the padding changes nothing, such as
zeros in a sum or minus infinity in a softmax. An op without a handler here may see the longest length.
"""

from __future__ import annotations

from torch import Tensor

from fxgrad.host.ops import schema
from fxgrad.proof.calls import Call
from fxgrad.proof.longest import own, places
from fxgrad.proof.longest.along import along
from fxgrad.proof.longest.elements import elementwise
from fxgrad.proof.longest.steps import HANDLERS, Lengths, Padded, Seen, Step, held
from fxgrad.proof.rules import pointwise
from fxgrad.proof.rules.along import along as reduction
from fxgrad.proof.rules.registry import Rule

__all__ = ["after", "own", "places"]


def after(call: Call, rule: Rule | None, lengths: Lengths) -> list[Padded]:
    """Return the padded dimensions of each output; raise `Seen` if the call may see the longest length."""
    step = Step(call, lengths)
    handler = HANDLERS.get(call.name if call.func.namespace in ("aten", "prims") else schema(call.func).name)
    if handler is None and rule is not None and rule.__module__ == pointwise.__name__:
        handler = elementwise
    elif handler is None and rule is reduction:
        handler = along
    if handler is None:
        raise Seen
    try:
        padded = handler(step)
    except (RuntimeError, ValueError, IndexError, KeyError):
        raise Seen from None
    for out, steps in zip(call.outputs, padded, strict=True):
        if isinstance(out, Tensor) and steps.keys() != set(step.dims(out)):
            raise Seen
    pairs = zip(call.outputs, padded, strict=True)
    return [{dim: held(one, out.dtype) for dim, one in steps.items()} for out, steps in pairs]
