"""What the model families have in common: they are listed by name, and start from weights that are neither 0 nor 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

B, IMAGE = 3, 32  # samples; pixels on a side
TOLERANCE = 1e-8

Inputs = dict[str, Any]
Family = Callable[[float], tuple[nn.Module, Inputs]]
"""Makes a small model with this dropout, in training mode, and its inputs."""


class Families(dict[str, Family]):
    """A table of families, to be used as a decorator: each is listed under its function's name."""

    def __call__(self, make: Family) -> Family:
        self[make.__name__] = make
        return make

    def without(self, *long: str) -> list[Any]:
        """The names as a test's parameters; these belong to the long run."""
        return [pytest.param(name, marks=pytest.mark.long if name in long else ()) for name in self]

    def but_long(self, *quick: str) -> list[Any]:
        """The names as a test's parameters; all but a few belong to the long run."""
        return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in self]

    def build(self, name: str, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
        """The model and its inputs in float64."""
        model, inputs = self[name](dropout)
        scatter(model)
        return model.double(), {key: _double(value) for key, value in inputs.items()}


def scatter(model: nn.Module) -> None:
    """Move parameters away from where they start: a layer scale of 0 would hide what is behind it."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
