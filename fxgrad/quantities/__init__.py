"""Quantities: functions of the per-sample gradients that a backward delivers, one class each."""

from __future__ import annotations

from collections.abc import Sequence

from fxgrad.errors import OptionError
from fxgrad.quantities.base import GRAD, OUTSIDE, RESULT, Delivery, Outside, Quantity
from fxgrad.quantities.clipping import ClippedGrad, Clipping
from fxgrad.quantities.moments import Grad, GradVariance, SquaredGrad
from fxgrad.quantities.products import GradDot, GradGram, GradProjection
from fxgrad.quantities.samples import GradSample, NormSample

__all__ = [
    "GRAD",
    "OUTSIDE",
    "RESULT",
    "ClippedGrad",
    "Clipping",
    "Delivery",
    "Grad",
    "GradDot",
    "GradGram",
    "GradProjection",
    "GradSample",
    "GradVariance",
    "NormSample",
    "Outside",
    "Quantity",
    "SquaredGrad",
    "check_quantities",
]


def check_quantities(quantity: Quantity | Sequence[Quantity]) -> tuple[Quantity, ...]:
    """Check the requested quantities: at least one, without duplicates, and at most one that writes p.grad."""
    asked = (quantity,) if isinstance(quantity, Quantity) else tuple(quantity) if isinstance(quantity, Sequence) else ()
    if not asked or not all(isinstance(one, Quantity) for one in asked):
        raise OptionError(
            f"quantity has to be a quantity such as fxgrad.GradSample(), or a list of them, not {quantity!r}"
        )
    if len({id(one) for one in asked}) < len(asked) or any(a == b for i, a in enumerate(asked) for b in asked[:i]):
        raise OptionError("a quantity is asked for twice", advice="Leave one out.")
    writers = [one for one in asked if isinstance(one, Grad) or one.guards_grad]
    if len(writers) > 1:
        raise OptionError(
            f"{' and '.join(str(one) for one in writers)} both write p.grad", advice="Ask for one of them."
        )
    return asked
