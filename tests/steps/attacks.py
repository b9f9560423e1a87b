"""The hand-written attacks as steps: each is called in the middle of a random program."""

from __future__ import annotations

from functools import cache

import torch

from tests.attacks import (
    doors,
    factories,
    functions,
    indices,
    lookups,
    losses,
    numbers,
    views,
    writes,
)
from tests.attacks.model import FEATURES, Attack
from tests.steps.builder import Builder, Layout, Value
from tests.steps.expected import Expected
from tests.steps.step import Step, Table
from tests.steps.texts import rows

ATTACKS: dict[str, Attack] = {
    str(attack): attack
    for table in (numbers, writes, indices, factories, views, lookups, functions, losses, doors)
    for attack in table.ATTACKS
}
PROGRAMS = {name: attack.program for name, attack in ATTACKS.items()}
"""What the generated text calls, by name."""

SAMPLES = 6


def step(name: str, attack: Attack) -> Step:
    """The attack called with a layer and rows of three columns; a loss goes on as a factor of 1 beside the rows."""

    def build(b: Builder, v: Value) -> Value | None:
        if not keeps_shape(name):
            return None
        x = rows(b, v)
        if x is None:
            return None
        if x.shape[1] != FEATURES:
            layer = b.module(f"nn.Linear({x.shape[1]}, {FEATURES})")
            x = b.emit(f"{layer}({x.name})", (1, FEATURES), Layout(0), x, learned=True)
        layer = b.module(f"nn.Linear({FEATURES}, {FEATURES})")
        return b.like(f'ATTACKS["{name}"]({layer}, {x.name})', x, learned=True)

    return Step("attacks", name, build, Expected.APART if attack.right else Expected.DEPENDS)


@cache
def keeps_shape(name: str) -> bool:
    """Whether the attack gives rows of the shape it gets."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layer, x = torch.nn.Linear(FEATURES, FEATURES), torch.ones(SAMPLES, FEATURES).cumsum(1).cumsum(0).sin()
        y = PROGRAMS[name](layer, x)
    except (RuntimeError, IndexError, ValueError, AttributeError):  # the last: it reads a buffer of the attacked model
        return False
    finally:
        torch.set_default_dtype(default)
    return y.shape == x.shape and y.dtype == x.dtype


ATTACK_STEPS: Table = [step(name, attack) for name, attack in ATTACKS.items()]
