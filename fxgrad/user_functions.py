"""A user's autograd.Function in a captured graph: a leaf, whose own backward decides.

Dynamo hands over two graphs: the forward, which also returns what it saved, and the backward. A tap inside of
them would put PyTorch's derivative in the place of the user's (of a straight-through estimator, of a gradient
reversal). So they stay whole: a parameter's gradient for sample n is what the two return for sample n alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

AUTOGRAD_FUNCTION = "fxgrad.user_functions.autograd_function"  # the canonical name of such an op


class UserFunction:
    """The call target that stands for ``autograd_function_apply(fwd, bwd, *args)``; its bodies are closed over."""

    __module__ = "fxgrad.user_functions"
    __name__ = __qualname__ = "autograd_function"

    def __init__(self, fwd: fx.GraphModule, bwd: fx.GraphModule, settings: Mapping[str, Any]) -> None:
        self.fwd, self.bwd, self.settings = fwd, bwd, dict(settings)

    @property
    def bodies(self) -> list[fx.GraphModule]:
        return [self.fwd, self.bwd]

    def __call__(self, *args: Any) -> Any:
        return torch.ops.higher_order.autograd_function_apply(self.fwd, self.bwd, *args, **self.settings)

    def __repr__(self) -> str:
        return "autograd_function"

    def vjp(self, args: Sequence[Any], grads: Mapping[int, Tensor]) -> list[Tensor | None]:
        """What the user's backward returns for each argument of the forward, from the gradients of some outputs."""
        with torch.no_grad():  # the bodies switch gradients off, and on again
            outs, saved = fx.Interpreter(self.fwd).run(*args)
        with torch.no_grad():
            given = [
                torch.zeros_like(out) if isinstance(out, Tensor) and i not in grads else grads.get(i)
                for i, out in enumerate(outs)
            ]
            return list(fx.Interpreter(self.bwd).run(*given, *saved))

    def text(self) -> str:
        """The computation in words, the same in every process."""
        return f"{self.fwd.code}{self.bwd.code}{sorted(self.settings.items())}"


def fitted(grad: Tensor | None, like: Tensor) -> Tensor:
    """A gradient as autograd takes it for an input: summed where it is larger, expanded where it is smaller."""
    if grad is None:
        return torch.zeros_like(like)
    if grad.shape != like.shape:
        larger = grad.dim() > like.dim() or grad.numel() > like.numel()
        grad = grad.sum_to_size(like.shape) if larger else grad.expand(like.shape)
    return grad.to(like.dtype)
