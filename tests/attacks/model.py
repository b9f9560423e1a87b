"""The model that every attack runs in, and the table it is entered in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

FEATURES = 3


class Net(nn.Module):
    """One layer, and whatever an attack does with it; a batch is [B, 3]."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
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
