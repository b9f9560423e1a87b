"""Every attack comes out as its table says: right by the loop over single samples, or refused by fxgrad."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
from tests.attacks.model import Attack
from tests.attacks.oracle import REFUSED, RIGHT, outcome
from tests.programs import quick_dynamo

TABLES = (numbers, writes, indices, factories, views, lookups, functions, losses, doors)
ATTACKS = [attack for table in TABLES for attack in table.ATTACKS]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack(attack: Attack, device: torch.device) -> None:
    torch._dynamo.reset()
    found, said = outcome(attack, device)
    assert found == (RIGHT if attack.right else REFUSED), said


def test_names_are_unique() -> None:
    assert len({str(attack) for attack in ATTACKS}) == len(ATTACKS)
