"""All tables of steps: draw from these."""

from __future__ import annotations

import random

import tests.steps.layers  # noqa: F401  (fills PARAMETRIC)
from tests.steps.attacks import ATTACK_STEPS
from tests.steps.doors import DOORS, HOOKS, WRITES
from tests.steps.endings import LOSSES
from tests.steps.expected import Expected
from tests.steps.local import LOCAL
from tests.steps.mixing import MIXING
from tests.steps.moves import MOVES
from tests.steps.numbers import FACTORIES, NUMBERS
from tests.steps.parametric import PARAMETRIC
from tests.steps.places import FUNCTIONS, INDICES, LOOKUPS, VIEWS
from tests.steps.step import Step, Table

TEXTS: tuple[Table, ...] = (NUMBERS, FACTORIES, INDICES, VIEWS, LOOKUPS, FUNCTIONS, WRITES, DOORS, HOOKS)
"""One table for each way in which the hand-written attacks let samples meet."""

STEPS: tuple[Table, ...] = (PARAMETRIC, MOVES, LOCAL, MIXING, ATTACK_STEPS, *TEXTS)
"""Steps from value to value; `LOSSES` end a program."""

WEIGHTS = {"parametric": 18, "moves": 12, "local": 6, "attacks": 3}  # every other kind: 1


def of(tables: tuple[Table, ...], *expected: Expected) -> list[Table]:
    """The tables without the steps that are expected otherwise."""
    kept = [[step for step in table if step.expected in expected] for table in tables]
    return [table for table in kept if table]


APART = of(STEPS, Expected.APART)
OFTEN = [table for table in APART for _ in range(WEIGHTS.get(table[0].kind, 1))]
TOGETHER = of(STEPS, Expected.MIXES) + of(TEXTS, Expected.DEPENDS) + of((ATTACK_STEPS,), Expected.DEPENDS)


def draw(rng: random.Random, tables: list[Table]) -> Step:
    """A step of one kind; where steps keep samples apart, layers and moves come most often."""
    return rng.choice(rng.choice(OFTEN if tables is APART else tables))


def losses(*expected: Expected) -> Table:
    """The losses of this kind."""
    return [step for step in LOSSES if step.expected in expected]
