"""Names that the texts of steps use beside torch, nn and F."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as scan_operator
from torch._higher_order_ops.while_loop import while_loop as while_operator
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


def scan(combine: Callable[..., Any], carry: Any, xs: Tensor) -> Any:
    """PyTorch's operator in a graph; a loop where nothing is compiled, for which the operator would compile itself."""
    if torch.compiler.is_compiling():
        return scan_operator(combine, carry, xs)
    ys = []
    for x in xs.unbind(0):
        carry, y = combine(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def while_loop(condition: Callable[..., Any], body: Callable[..., Any], state: tuple[Tensor, ...]) -> Any:
    """As `scan`."""
    if torch.compiler.is_compiling():
        return while_operator(condition, body, state)
    while condition(*state):
        state = body(*state)
    return state


def cond(condition: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: tuple[Tensor, ...]) -> Any:
    """As `scan`."""
    if torch.compiler.is_compiling():
        return torch.cond(condition, yes, no, operands)
    return (yes if condition else no)(*operands)


def with_hook(z: Tensor, hook: Any) -> None:
    """Register a hook on z, where z has a gradient."""
    if z.requires_grad:
        z.register_hook(hook)


STORE: dict[str, Any] = {}
NAMES = {
    "math": math,
    "checkpoint": checkpoint,
    "cond": cond,
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
