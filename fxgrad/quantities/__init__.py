"""Quantities: functions of the per-sample gradients that a backward delivers, one class each."""

from __future__ import annotations

from collections.abc import Sequence

from fxgrad.errors import OptionError, nearest
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
            f"quantity has to be a quantity such as fxgrad.GradSample(), or a list of them, not {quantity!r}",
            advice=_meant(quantity),
        )
    if len({id(one) for one in asked}) < len(asked) or any(a == b for i, a in enumerate(asked) for b in asked[:i]):
        raise OptionError("a quantity is asked for twice", advice="Leave one out.")
    writers = [one for one in asked if isinstance(one, Grad) or one.guards_grad]
    if len(writers) > 1:
        raise OptionError(
            f"{' and '.join(str(one) for one in writers)} both write p.grad", advice="Ask for one of them."
        )
    return asked


def _meant(quantity: object) -> str:
    """Return advice for what is no quantity: a class, a name, an empty list."""
    one = quantity[0] if isinstance(quantity, list | tuple) and quantity else quantity
    if isinstance(one, type) and issubclass(one, Quantity):
        return f"Pass an object, not the class: {one.__name__}({'max_grad_norm=1.0' if one is ClippedGrad else ''})."
    kinds = [name for name in __all__ if name not in ("Clipping", "Delivery", "Quantity") and name[1:2].islower()]
    known = [name for name in kinds if name != "Outside" and name[0].isupper()]
    listed = f"The quantities are {', '.join(sorted(known))}."
    if one in known:
        return f"Pass an object, not its name: {one}({'max_grad_norm=1.0' if one == ClippedGrad.__name__ else '..'})."
    return nearest(one, known, listed)
