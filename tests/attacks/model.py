"""The model that every attack runs in, and the table it is entered in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 3


class Net(nn.Module):
    """One layer with a buffer, and whatever an attack does with them; a batch is [B, 3]."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.layer.register_buffer("memory", torch.ones(FEATURES))
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer, x)


Program = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Attack:
    """A program, and whether fxgrad has to get it right or to refuse it."""

    kind: str
    name: str
    program: Program
    right: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def attacks(kind: str, *, right: Mapping[str, Program], refused: Mapping[str, Program]) -> list[Attack]:
    """The attacks of one kind."""
    return [
        *(Attack(kind, name, program, True) for name, program in right.items()),
        *(Attack(kind, name, program, False) for name, program in refused.items()),
    ]


def steps(x: Tensor) -> Tensor:
    """Make four steps of each sample [B, 4, 3], none of which is zero."""
    return torch.stack([x, x.sin(), x * x, x + 1], 1)


def lengths(x: Tensor) -> Tensor:
    """Count, for each sample, the steps that it has: from 1 to 4 [B]."""
    return (x > 0).sum(1) + 1


def ids(x: Tensor) -> Tensor:
    """Make four ids below 3 of each sample [B, 4]."""
    return steps(x).argmax(2)
