"""Names that the texts of steps use beside torch, nn and F."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from tests.attacks import writes  # noqa: F401  (registers the custom op)
from tests.attacks.functions import Centred, CentredBackward, Twice


class Scaled(torch.autograd.Function):
    """x r, where r is one value for each column."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Tensor) -> Tensor:
        ctx.save_for_backward(x, r)
        return x * r

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, r = ctx.saved_tensors
        return g * r, (g * x).sum(0)


class ScaledBackward(torch.autograd.Function):
    """The forward leaves x alone, the backward multiplies by r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Tensor) -> Tensor:
        ctx.save_for_backward(r)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (r,) = ctx.saved_tensors
        return g * r, None


def with_hook(z: Tensor, hook: Any) -> None:
    """Register a hook on z, where z has a gradient."""
    if z.requires_grad:
        z.register_hook(hook)


STORE: dict[str, Any] = {}
NAMES = {
    "math": math,
    "checkpoint": checkpoint,
    "scan": scan,
    "while_loop": while_loop,
    "Centred": Centred,
    "CentredBackward": CentredBackward,
    "Scaled": Scaled,
    "ScaledBackward": ScaledBackward,
    "Twice": Twice,
    "STORE": STORE,
    "with_hook": with_hook,
}
