"""Every attack comes out as its table says: right by the loop over single samples, or refused by fxgrad."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx

from fxgrad.compile import pipeline
from fxgrad.errors import FxgradError
from fxgrad.graph.context import Context
from fxgrad.passes.prove_independence import prove_independence
from fxgrad.passes.split_lookups import split_lookups
from tests.attacks import (
    aliases,
    attention,
    backward,
    bags,
    copies,
    doors,
    factories,
    functions,
    indices,
    lookups,
    loops,
    losses,
    masks,
    numbers,
    packed,
    pieces,
    places,
    put_back,
    signals,
    totals,
    views,
    writes,
)
from tests.attacks.model import Attack
from tests.attacks.oracle import REFUSED, RIGHT, outcome
from tests.programs import quick_dynamo
from tests.quick import long_but

TABLES = (
    *(numbers, writes, indices, factories, views, lookups, functions, losses, doors),
    *(aliases, places, bags, packed, backward, loops, totals, attention, signals, pieces, put_back, copies),
    *(masks,),
)
ATTACKS = [attack for table in TABLES for attack in table.ATTACKS]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


# The length of the longest sample is the proof's affair alone; of these others, infer_samples sees less.
LEFT_TO_THE_PROOF = {
    *(str(attack) for attack in packed.ATTACKS),
    "writes: written by batch norm",
    "writes: written by batch norm between two calls",
    "lookups: rows of two norms",
    "lookups: rows of a norm and of none",
    "lookups: rows of a norm, summed",
    "doors: a norm of one group of all",
    "numbers: indices and a number of parameters",
    "numbers: indices and a table of such numbers",
    "numbers: rolled by a number of parameters",
    "numbers: repeated as parameters say",
    "indices: rolled by all and more",
    "lookups: rows within two bounds",
    "lookups: rows within a bound of another norm",
    "lookups: rows within a bound, as other rows",
    "lookups: rows within a bound of others' reads",
}
BY_BOTH = dict.fromkeys(attack for attack in ATTACKS if not attack.right and str(attack) not in LEFT_TO_THE_PROOF)
"""What is refused without the proof is refused with it: that `make long` sees again."""


@pytest.mark.parametrize("attack", long_but(lambda attack: attack not in BY_BOTH, ATTACKS), ids=str)
def test_attack(attack: Attack, device: torch.device) -> None:
    torch._dynamo.reset()
    found, said = outcome(attack, device)
    assert found == (RIGHT if attack.right else REFUSED), said


BY_METHOD = {"views: written as integers", "writes: shifted in place", "writes: shifted samples"}


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if str(attack) in BY_METHOD], ids=str)
def test_under_a_default_device(attack: Attack) -> None:
    """Under any function mode Dynamo writes ``x <<= y`` as ``x.__ilshift__(y)``."""
    torch._dynamo.reset()
    with torch.device("cpu"):
        assert outcome(attack, torch.device("cpu")) == (RIGHT, "")


SHARED = pipeline.PASSES.index(split_lookups)
"""The passes before it do the same whether mixing is allowed or not."""


def silent(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Stand in the proof's place and refuse nothing."""
    return gm


# Only values show that these indices do not undo an order: the call refuses them, and the proof accepts the graph.
AT_THE_CALL = {f"lookups: the order not undone{which}" for which in ("", ", to the longest", ", of lengths")}
BEFORE_THE_CALL = [attack for attack in ATTACKS if not attack.right and str(attack) not in AT_THE_CALL]


@pytest.mark.parametrize("attack", BEFORE_THE_CALL, ids=str)
def test_each_refuses_alone(attack: Attack, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one capture: the proof refuses what reaches it, and the passes before it refuse all of BY_BOTH."""
    refused: dict[str, bool] = {}
    reached = []

    def strict(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        reached.append(attack)
        return prove_independence(gm, replace(ctx, mixing="error"))

    def refuses(gm: fx.GraphModule, ctx: Context, proof: pipeline.Pass) -> bool:
        rest = [proof if one is prove_independence else one for one in later]
        try:
            pipeline.run_passes(gm, ctx, rest)
        except FxgradError:
            return True
        return False

    def both(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        if attack in BY_BOTH:
            refused["without the proof"] = refuses(gm, ctx, silent)
        proved = refuses(gm, replace(ctx, mixing="allow"), strict)
        refused["by the proof"] = proved or not reached
        raise FxgradError("both are asked")

    later = pipeline.PASSES[SHARED:]
    torch._dynamo.reset()
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES[:SHARED], both))
    found, said = outcome(attack, device)
    assert found == REFUSED and all(refused.values()), (said, refused)


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if str(attack) in AT_THE_CALL], ids=str)
def test_indices_that_do_not_undo_an_order(attack: Attack) -> None:
    """The check of their values does not depend on `mixing`. On a GPU the device checks, and stops for good."""
    torch._dynamo.reset()
    found, said = outcome(attack, torch.device("cpu"), mixing="allow")
    assert found == REFUSED and "do not undo" in said, said


REWRITTEN = [*pieces.ATTACKS, *put_back.ATTACKS, *masks.ATTACKS, *(one for one in aliases.ATTACKS if one.right)]


@pytest.mark.parametrize("attack", REWRITTEN, ids=str)
def test_one_sample(attack: Attack, device: torch.device) -> None:
    """A batch of one sample meets no other; what rewrites the graph runs for it, too."""
    torch._dynamo.reset()
    found, said = outcome(attack, device, size=1)
    assert found == RIGHT or (found == REFUSED and not attack.right), said


# What passes rewrite around writes, AOTAutograd makes functional: as these show.
COMPILED = {
    *("writes: copies scaled", "writes: copies written over in part", "writes: mask tokens"),
    *("writes: expanded, unread", "writes: places scaled", "writes: sorted rows put back"),
    *("views: joined and written", "views: relu in place by another name"),
}


@pytest.mark.parametrize(
    ("attack", "backend"),
    long_but(
        lambda attack, backend: backend == "aot_eager" or str(attack) == "writes: sorted rows put back",
        itertools.product([attack for attack in ATTACKS if str(attack) in COMPILED], ("aot_eager", "inductor")),
    ),
    ids=str,
)
def test_compiled(attack: Attack, backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    assert outcome(attack, device, backend=backend) == (RIGHT, "")


def test_names_are_unique() -> None:
    assert len({str(attack) for attack in ATTACKS}) == len(ATTACKS)
