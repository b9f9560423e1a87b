"""Random programs against the loop over single samples: a fixed sample of them; `tests/fuzz.py` is the long run."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap

from tests import fuzz
from tests.attacks.test_attacks import ATTACKS
from tests.program_oracle import (
    Input,
    Program,
    Truth,
    grad_error,
    loop,
    loss_of,
    mixes_by_oracle,
)
from tests.programs import (
    MANY,
    SIZES,
    Outcome,
    check,
    float64,
    for_programs,
    is_known,
    is_tame,
    program_of,
    quick_dynamo,
    some_programs,
    write,
)
from tests.quick import long_but
from tests.steps import tables
from tests.steps.builder import Layout
from tests.steps.endings import LOSSES
from tests.steps.expected import Expected
from tests.steps.step import Step

MOST_REFUSED = 0.25  # of a few programs that keep samples apart


pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, on what programs do


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


def fail(program: Program, outcome: Outcome) -> str:
    return f"seed {program.seed} size {program.size}: {outcome.kind}: {outcome.reason}\n{program.source}"


def check_block(number: int, count: int, backend: str, sizes: st.SearchStrategy[int] = SIZES) -> None:
    """No silent difference, no crash, every refusal known and few of them."""
    kinds: Counter[str] = Counter()

    def check_one(program: Program, second_batch: int | None) -> None:
        outcome = check(program, backend, second_batch)
        kinds[outcome.kind] += 1
        assert not outcome.fails, fail(program, outcome)
        assert outcome.kind != "refused" or is_known(outcome.reason, program.source), fail(program, outcome)

    for_programs(check_one, number, count, sizes)
    assert kinds["refused"] <= MOST_REFUSED * kinds.total()


FAILED_ONCE = {
    "a transposed convolution whose input, one position long, looks as if its channels were last": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.empty((4, 3, 2)))

    def forward(self, x0):
        x = x0.sin().t().reshape(4, 1, x0.shape[0], 1).movedim(2, 0).flatten(2)
        return F.conv_transpose1d(x, self.p1, stride=2)
""",
    "two transposed convolutions, the second along what were the first one's positions": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p1 = nn.Parameter(torch.empty((4, 2, 2)))
        self.p2 = nn.Parameter(torch.empty((2, 2, 2)))

    def forward(self, x0):
        x = F.conv_transpose1d(x0.unsqueeze(-1), self.p1, stride=2).transpose(1, -1)
        return F.max_pool1d(F.conv_transpose1d(x, self.p2, stride=2), 2, 1)
""",
}


@pytest.mark.parametrize("name", FAILED_ONCE)
def test_programs_that_failed_once(name: str) -> None:
    source = FAILED_ONCE[name].lstrip()
    kept = Program(0, 0, 3, source, (Input("x0", (1, 4), 0),), (Layout(0),), Expected.APART)
    outcome = check(kept, "eager", second_batch=7)
    assert outcome == Outcome("right"), fail(kept, outcome)


@pytest.mark.parametrize("number", long_but(lambda number: number < 2, range(4)))
def test_eager(number: int) -> None:
    check_block(number, 60, "eager")


@pytest.mark.parametrize("number", long_but(lambda number: number < 1001, range(1000, 1002)))
def test_aot_eager(number: int) -> None:
    check_block(number, 30, "aot_eager")


@pytest.mark.inductor
def test_inductor() -> None:
    check_block(2000, 3, "inductor", st.just(3))


# ---------------------------------------------------------------------------- the checker itself


def test_checker_rejects_a_gradient_wrong_by_one_in_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Truth:
        truth = loop(*args)
        return replace(truth, grads={name: 1.001 * g for name, g in truth.grads.items()})

    program = next(p for p in some_programs(20) if check(p).kind == "right")
    monkeypatch.setattr("tests.programs.loop", wrong)
    assert check(program) == Outcome("wrong", f"the samples' gradients differ at batch size {program.batch}")


def test_long_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, seen = tmp_path / "state", []

    def run_block(number: int, **_: Any) -> tuple[int, dict[str, int], str]:
        seen.append(number)
        if number == 3 and len(seen) == 4:
            raise KeyboardInterrupt("block 3")
        return number, {"right": 100}, ""

    monkeypatch.setattr(fuzz, "run_block", run_block)
    with pytest.raises(KeyboardInterrupt, match="block 3"):
        fuzz.run(range(6), state, 1, backend="eager")
    results = fuzz.run(range(6), state, 1, backend="eager")
    assert seen == [0, 1, 2, 3, 3, 4, 5]
    assert sorted(results) == list(range(6))


def test_a_failing_program_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended defect, tanh, is found in a program with little else around it."""

    def pretend(program: Program, *_: Any) -> Outcome:
        return Outcome("wrong" if ".tanh()" in program.source else "right")

    monkeypatch.setattr(fuzz, "check", pretend)
    _, outcomes, failure = fuzz.run_block(0, "eager", count=100)
    assert outcomes["wrong"] > 1
    assert ".tanh()" in failure
    assert failure.count("= ") < 8, failure


# ---------------------------------------------------------------------------- the generator itself


def test_generator_knows_what_mixes() -> None:
    """What the oracle finds to mix was written to mix, and most of what was written to mix is found."""
    programs = [p for p in some_programs(200) if not p.ending]
    with float64():
        mixing = [p for p in programs if mixes_by_oracle(p)]
    assert not [p.source for p in mixing if p.expected is Expected.APART]
    meant = [p for p in programs if p.expected is Expected.MIXES]
    assert sum(p.expected is Expected.MIXES for p in mixing) >= 0.6 * len(meant) > 10


def test_every_kind_of_attack_has_steps() -> None:
    """Each kind has a table of steps, with such that keep samples apart and such that do not."""
    steps = [step for table in (*tables.TEXTS, LOSSES) for step in table]
    for kind in {attack.kind for attack in ATTACKS}:
        expected = {step.expected for step in steps if step.kind == kind}
        assert {Expected.APART, Expected.MIXES} <= expected, kind


def test_names_of_steps_are_unique() -> None:
    for table in (*tables.STEPS, LOSSES):
        names = [step.name for step in table]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("table", [*tables.TEXTS, LOSSES], ids=lambda table: table[0].kind)
def test_every_step_is_what_it_says(table: list[Step]) -> None:
    """Each step alone runs in plain PyTorch; the oracle finds none to mix that should not, and most others."""
    seen: dict[str, bool] = {}
    for step in table:
        program = tame_program_of(step)
        with float64():
            sizes = (program.batch, MANY) if step.expected is Expected.DEPENDS else (program.batch,)
            found = any(mixes_by_oracle(replace(program, batch=batch)) for batch in sizes)
        assert not (found and step.expected is Expected.APART), program.source
        if step.expected is not Expected.APART:
            seen[step.name] = found
    assert sum(seen.values()) >= 0.6 * len(seen), [name for name, found in seen.items() if not found]


def tame_program_of(step: Step) -> Program:
    """A program of the step alone with finite values and a gradient."""
    for seed in range(20):
        program = program_of(step, seed)
        with float64(), contextlib.suppress(RuntimeError):  # PyTorch itself refuses
            if program is not None and is_tame(program):
                return program
    raise AssertionError(f"{step.kind}: {step.name}: no program")


def test_generator_is_deterministic() -> None:
    sources, again, others = ([p.source for p in some_programs(9, number)] for number in (7, 7, 8))
    assert sources == again != others


def test_generator_writes_every_op() -> None:
    programs = (write(seed, 5, random.Random(seed)) for seed in range(2500))
    text = "".join(program.source for program in programs if program is not None)
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


def test_vmap_agrees_with_the_loop() -> None:
    """The second witness: vmap(grad) of the same programs, where vmap can run them."""
    programs = [p for p in some_programs(120) if p.expected is Expected.APART]
    with float64():
        errors = [error for p in programs if (error := vmap_error(p)) is not None]
    assert len(errors) > 30
    assert max(errors) < 1e-9


def vmap_error(program: Program) -> float | None:
    """vmap(grad) against the loop; None for what vmap cannot run (checkpoints, scans, numbers of tensors)."""
    model, args = program.model(), program.sample(program.batch)
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, torch.Tensor], *single: torch.Tensor) -> torch.Tensor:
        pairs = zip(single, program.in_dims, strict=True)
        kept = [x if d is None else x.unsqueeze(d) for x, d in pairs]
        return loss_of(functional_call(model, parameters, tuple(kept)))

    try:
        found = vmap(grad(loss), (None, *program.in_dims))(trainable, *args)
    except Exception:
        return None
    return grad_error(found, loop(program, model, args, program.batch).grads)
