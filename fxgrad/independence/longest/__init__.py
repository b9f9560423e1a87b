"""Dimensions as long as the longest sample, op by op: what stands in them where a shorter sample has ended.

A value that is padded to the longest sample is, for each sample, what that sample alone would give, and something
behind its end. So an op may work on each step alone, may look at steps from the front, and may work along all of them
only where what stands behind the ends changes nothing: zeros in a sum, minus infinity in a softmax. Whatever is not
listed here may see how long the longest sample is.
"""

from __future__ import annotations

from torch import Tensor

from fxgrad.independence.calls import Call
from fxgrad.independence.longest import own, places
from fxgrad.independence.longest.along import along
from fxgrad.independence.longest.elements import elementwise
from fxgrad.independence.longest.steps import HANDLERS, Lengths, Padded, Seen, Step, held
from fxgrad.independence.rules import pointwise
from fxgrad.independence.rules.along import along as reduction
from fxgrad.independence.rules.registry import Rule

__all__ = ["after", "own", "places"]


def after(call: Call, rule: Rule | None, lengths: Lengths) -> list[Padded]:
    """The steps of each output; `Seen` where the call may tell how many there are."""
    step = Step(call, lengths)
    handler = HANDLERS.get(call.name if call.func.namespace in ("aten", "prims") else call.func._schema.name)
    if handler is None and rule is not None and rule.__module__ == pointwise.__name__:
        handler = elementwise
    elif handler is None and rule is reduction:
        handler = along
    if handler is None:
        raise Seen
    try:
        found = handler(step)
    except (RuntimeError, ValueError, IndexError, KeyError):
        raise Seen from None
    for out, steps in zip(call.outputs, found, strict=True):
        if isinstance(out, Tensor) and steps.keys() != set(step.dims(out)):
            raise Seen
    pairs = zip(call.outputs, found, strict=True)
    return [{dim: held(one, out.dtype) for dim, one in steps.items()} for out, steps in pairs]
