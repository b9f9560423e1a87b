"""Random programs against the loop over single samples: a fixed sample of them; `tests/fuzz.py` is the long run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap

from tests import fuzz
from tests.program_oracle import Program, Truth, grad_error, loop, loss_of, mixes_by_oracle
from tests.programs import (
    Outcome,
    check,
    generate,
    is_known,
    quick_dynamo,
)

EAGER = range(150)
AOT = range(1000, 1040)
INDUCTOR = (2000, 2001, 2002)
MOST_REFUSED = 0.25  # of a few programs; 0.15 of thousands, nearly all for three reasons


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


def fail(program: Program, outcome: Outcome) -> str:
    return f"seed {program.seed} size {program.size}: {outcome.kind}: {outcome.reason}\n{program.source}"


def check_seeds(seeds: range, backend: str) -> None:
    """No silent difference, no crash, every refusal known and few of them."""
    refused = 0
    for seed in seeds:
        program = generate(seed)
        outcome = check(program, backend, second_batch=(7, 1, 0, None)[seed % 4])
        assert not outcome.fails, fail(program, outcome)
        if outcome.kind == "refused":
            refused += 1
            assert is_known(outcome.reason), fail(
                program, outcome
            )
    assert refused <= MOST_REFUSED * len(seeds)


def test_seeds_that_failed_once() -> None:
    """40124, 41103: a transposed convolution whose input, one position long, looks as if its channels were last."""
    for seed in (40124, 41103):
        program = generate(seed)
        outcome = check(program, "eager")
        assert not outcome.fails, fail(program, outcome)


@pytest.mark.parametrize("start", range(EAGER.start, EAGER.stop, 25))
def test_eager(start: int) -> None:
    check_seeds(range(start, start + 25), "eager")


@pytest.mark.parametrize("start", range(AOT.start, AOT.stop, 10))
def test_aot_eager(start: int) -> None:
    check_seeds(range(start, start + 10), "aot_eager")


@pytest.mark.inductor
@pytest.mark.parametrize("seed", INDUCTOR)
def test_inductor(seed: int) -> None:
    program = generate(seed, size=3)
    outcome = check(program, "inductor")
    assert not outcome.fails, fail(program, outcome)


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(size=st.integers(1, 10), seed=st.integers(0, 2**31))
def test_shrinking(size: int, seed: int) -> None:
    """Hypothesis lowers the size first, which shortens the program, then the seed."""
    program = generate(seed, size)
    outcome = check(program, "eager")
    assert not outcome.fails, fail(program, outcome)


# ---------------------------------------------------------------------------- the checker itself


def test_checker_rejects_a_gradient_wrong_by_one_in_a_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*args: Any) -> Truth:
        truth = loop(*args)
        return replace(truth, grads={name: 1.001 * g for name, g in truth.grads.items()})

    program = next(p for p in map(generate, range(20)) if check(p).kind == "right")
    monkeypatch.setattr("tests.programs.loop", wrong)
    assert check(program) == Outcome("wrong", f"grad_sample differs at batch size {program.batch}")


def test_long_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, seen = tmp_path / "state", []

    def run_seed(seed: int, **_: Any) -> tuple[int, Outcome, float]:
        seen.append(seed)
        if seed == 3 and len(seen) == 4:
            raise KeyboardInterrupt
        return seed, Outcome("right"), 0.1

    monkeypatch.setattr(fuzz, "run_seed", run_seed)
    with pytest.raises(KeyboardInterrupt):
        fuzz.run(range(6), state, 1, backend="eager")
    results = fuzz.run(range(6), state, 1, backend="eager")
    assert seen == [0, 1, 2, 3, 3, 4, 5]
    assert sorted(results) == list(range(6))


def test_a_failing_program_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended defect, tanh, is found in a program with little else around it."""

    def pretend(program: Program, **_: Any) -> Outcome:
        program.model()(*program.sample(program.batch))
        return Outcome("wrong" if ".tanh()" in program.source else "right")

    monkeypatch.setattr(fuzz, "check", pretend)
    long = next(p for p in map(generate, range(200)) if ".tanh()" in p.source and p.size > 6)
    short = fuzz.shortest(long, Outcome("wrong"))
    assert ".tanh()" in short.source
    assert len(short.source) < 0.8 * len(long.source)


# ---------------------------------------------------------------------------- the generator itself


def test_generator_knows_what_mixes() -> None:
    """What the oracle finds to mix was written to mix, and most of what was written to mix is found."""
    programs = [generate(seed) for seed in range(200)]
    by_oracle = [mixes_by_oracle(p) for p in programs]
    assert all(p.mixes for p, mixes in zip(programs, by_oracle, strict=True) if mixes)
    assert sum(by_oracle) >= 0.6 * sum(p.mixes for p in programs) > 10


def test_generator_is_deterministic() -> None:
    assert generate(7).source == generate(7).source
    assert generate(7).source != generate(8).source


def test_generator_writes_every_op() -> None:
    text = "".join(generate(seed).source for seed in range(450))
    for op in (
        "F.linear",
        "F.conv1d",
        "F.conv2d",
        "F.layer_norm",
        "F.group_norm",
        "F.instance_norm",
        "F.rms_norm",
    ):
        assert op in text, op
    for op in (
        "einsum",
        "bmm",
        "baddbmm",
        "addmm",
        "prelu",
        "F.embedding",
        "requires_grad_(False)",
        "padding_idx",
    ):
        assert op in text, op
    for op in (
        "flatten",
        "unflatten",
        "permute",
        "stack",
        "cat",
        "unbind",
        "chunk",
        "split",
        "gather",
        "roll",
        "flip",
    ):
        assert op in text, op


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_agrees_with_the_loop() -> None:
    """The second witness: vmap(grad) of the same programs, where vmap can run them."""
    errors = [error for seed in range(60) if (error := vmap_error(generate(seed))) is not None]
    assert len(errors) > 50
    assert max(errors) < 1e-9


def vmap_error(program: Program) -> float | None:
    """vmap(grad) against the loop; None for what vmap cannot run (checkpoints, run-time ranges)."""
    model, args = program.model(), program.sample(program.batch)
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, torch.Tensor], *single: torch.Tensor) -> torch.Tensor:
        pairs = zip(single, program.in_dims, strict=True)
        kept = [x if d is None else x.unsqueeze(d) for x, d in pairs]
        return loss_of(functional_call(model, parameters, tuple(kept)))

    try:
        found = vmap(grad(loss), (None, *program.in_dims))(trainable, *args)
    except RuntimeError:
        return None
    return grad_error(found, loop(program, model, args, program.batch).grads)
