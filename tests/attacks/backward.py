"""What runs in the backward alone: a user's own backward, hooks, and what a forward saves for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.attacks.model import attacks


class OwnLinear(torch.autograd.Function):
    """x w, with the gradients as they should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class OfTheLargestSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.max()


class SavedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.mean(0))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.flip(0)


class FlippedByCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        z = g.clone()
        z.copy_(g.flip(0))
        return z


class FlippedBetween(torch.autograd.Function):
    """What it saved is written to between two calls of one op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        z = x.clone()
        before = z.sin()
        z.copy_(x.flip(0))
        return g * z.sin() * before


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class OfTwo(torch.autograd.Function):
    """The second output's gradients are summed into the first's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return g + h.sum(0) * 0.1, h


class BeyondARow(torch.autograd.Function):
    """Its backward reads beyond a row that it named before it wrote behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        padded = torch.zeros(g.shape[0] + 1, 3)
        row = padded[0]
        padded[1:] = g
        return g + torch.as_strided(row, (3,), (1,), 3)


def two_outputs(m: Any, x: Tensor) -> Tensor:
    first, second = OfTwo.apply(m(x), m(x.sin()))
    return first + second


def hooked(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h.register_hook(lambda g: g - g.mean(0))
    return h * 2


def hooked_within(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h.register_hook(lambda g: g * 2)
    return h.sin()


ATTACKS = attacks(
    "functions",
    right={
        "an own linear layer": lambda m, x: OwnLinear.apply(x, m.weight),
        "an own linear layer of a scaled weight": lambda m, x: OwnLinear.apply(x, m.weight * 2),
        "an own linear layer after a layer": lambda m, x: OwnLinear.apply(m(x), m.weight),
        "a hook that scales": hooked_within,
    },
    refused={
        "a backward of the largest saved": lambda m, x: OfTheLargestSaved.apply(m(x)),
        "a backward of a saved mean": lambda m, x: SavedMean.apply(m(x)),
        "a backward that flips": lambda m, x: Flipped.apply(m(x)),
        "a backward that flips by a copy": lambda m, x: FlippedByCopy.apply(m(x)),
        "a backward that flips between two calls": lambda m, x: FlippedBetween.apply(m(x)),
        "a backward that normalises": lambda m, x: Normalised.apply(m(x)),
        "a backward that sums another gradient": two_outputs,
        "a hook that centres": hooked,
        "a backward that reads beyond a row": lambda m, x: BeyondARow.apply(m(x)).sin(),
    },
)
