"""What is made of the per-sample gradients.

A quantity is an operation on terms. `GradSample` adds them up densely, as soon as a tap delivers them:
holding every factor until the end would only raise the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxgrad.terms import Term


@dataclass(frozen=True)
class GradSample:
    """The gradient of every sample by its own copy of each parameter: ``p.grad_sample``, ``[B, *p.shape]``."""

    def add(self, total: Tensor | None, part: Term | Tensor) -> Tensor:
        """One more use of a parameter."""
        dense = part.dense() if isinstance(part, Term) else part
        return dense if total is None else total + dense

    def finish(self, total: Tensor | None, like: Tensor) -> Tensor:
        """What the backward returns for a parameter; ``like`` has grad_sample's shape, dtype and device."""
        if total is None:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        total = total.real if total.is_complex() and not like.is_complex() else total
        return total.to(like.dtype).contiguous()

    def __str__(self) -> str:
        return "GradSample"


Quantity = GradSample


def check_quantities(quantity: Quantity | Sequence[Quantity]) -> Quantity:
    """The one quantity asked for."""
    from fxgrad.errors import OptionError

    found = [quantity] if isinstance(quantity, GradSample) else list(quantity)
    if len(found) != 1 or not isinstance(found[0], GradSample):
        raise OptionError(f"quantity has to be fxgrad.GradSample(), not {quantity!r}")
    return found[0]
