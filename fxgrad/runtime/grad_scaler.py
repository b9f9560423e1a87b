"""PyTorch's GradScaler multiplies the loss: norms are then those of scaled gradients, and clip too much."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch.amp.grad_scaler import GradScaler

from fxgrad.errors import OptionError
from fxgrad.host.modules import has_scaled
from fxgrad.runtime.autograd_graph import frames_from, is_scaled

RECIPE = (
    "Use bfloat16, which needs no scaler. For float16 scale by a constant that fxgrad knows: "
    "(loss * 1024).backward() with transform(.., loss_reduction=1 / 1024), which fxgrad.opacus does not have. If the "
    "scaler is another model's, keep it out of the function that calls this backward, and of its callers."
)


def check_unscaled(roots: Iterable[Any]) -> None:
    """Raise where a root of the running backward call is a loss that a GradScaler multiplied.

    The product with its scale is an op like any other, and what the op saved is freed by now. So a scaler is looked
    for where the caller has one: among the variables of the calling functions and the attributes of their ``self``.
    """
    if any(map(is_scaled, roots)) and any(map(_scales, _in_reach())):
        raise OptionError(
            "the loss is scaled by a GradScaler: the norms would be those of the scaled gradients", advice=RECIPE
        )


def check_no_scaler_steps() -> None:
    """Raise where a GradScaler calls an optimizer's step: it has divided p.grad, which PyTorch does not count."""
    if any(isinstance(frame.f_locals.get("self"), GradScaler) for frame in frames_from(sys._getframe(1))):
        raise OptionError("a GradScaler calls step(): p.grad is not what was clipped any more", advice=RECIPE)


def _scales(value: Any) -> bool:
    return isinstance(value, GradScaler) and has_scaled(value)


def _in_reach() -> Iterator[Any]:
    for frame in frames_from(sys._getframe()):
        variables = frame.f_locals
        yield from list(variables.values())
        for value in list(getattr(variables.get("self"), "__dict__", {}).values()):
            yield value
            yield from list(getattr(value, "__dict__", {}).values())  # trainer.accelerator.scaler
        yield from list(frame.f_globals.values())
