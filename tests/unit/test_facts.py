"""Facts of nodes: typed keys of node.meta, which nothing reads by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import fx

from fxgrad.errors import SpecViolation
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import EXAMPLE, FAKE, TRACED, put_facts
from fxgrad.rules.uses import USE
from fxgrad.runtime.checkpointing import POLICY
from fxgrad.samples.layouts import SAMPLES

ROOT = Path(__file__).parents[2]
FACTS = (EXAMPLE, FAKE, TRACED, CALL, SAMPLES, USE, POLICY)
KEYS = "|".join(fact.key for fact in FACTS)
BY_HAND = re.compile(rf"""\.meta(\.get\(|\[|\.update\()\s*\{{?["']?({KEYS})\b""")


def a_node() -> fx.Node:
    return fx.Graph().placeholder("x")


def test_a_fact_that_no_pass_wrote_names_the_pass() -> None:
    with pytest.raises(SpecViolation, match="x has no 'samples': infer_samples writes it"):
        SAMPLES.of(a_node())


def test_a_value_of_another_type_is_not_written() -> None:
    node = a_node()
    with pytest.raises(SpecViolation, match="x cannot have str as its 'call'"):
        put_facts(node, {FAKE: torch.ones(2), CALL: "linear"})
    assert not CALL.on(node) and CALL.get(node) is None


def test_facts_of_a_node() -> None:
    node = a_node()
    put_facts(node, {FAKE: 3, TRACED: False})
    assert (FAKE.of(node), TRACED.of(node), TRACED.get(node), EXAMPLE.get(node, 5)) == (3, False, False, 5)


def test_every_fact_has_a_key_of_its_own() -> None:
    assert len({fact.key for fact in FACTS}) == len(FACTS)


@pytest.mark.parametrize("room", ["fxgrad", "passes"])
def test_no_fact_is_read_or_written_by_hand(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not BY_HAND.search(line), f"{path}: {line}"
