"""Parts of logical batches: each release is of parts of one Poisson batch, whatever happens to a step or a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fxgrad.errors import UnaccountedGrad
from fxgrad.opacus import PrivacyEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]
ROWS, BATCH, PHYSICAL, C = 12, 6, 2, 1.0
MODES = pytest.mark.parametrize("mode", ["ghost", "hooks"])


class Drawn(UniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus's sampler, which notes its batches."""

    batches: list[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            self.batches.append(batch)
            yield batch


class Run:
    """A weight for each sample, so that p.grad of a release shows how often each sample is in it."""

    def __init__(self, mode: str, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(ROWS, 1, bias=False)
        data = TensorDataset(torch.eye(ROWS), torch.arange(ROWS))
        workers = {name: options.pop(name) for name in ("num_workers", "persistent_workers") if name in options}
        self.engine = PrivacyEngine(accountant="rdp")
        made = self.engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=1.0),
            data_loader=DataLoader(data, BATCH, **workers),
            noise_multiplier=options.pop("noise_multiplier", 0.0),
            max_grad_norm=options.pop("max_grad_norm", C),
            grad_sample_mode=mode,
            loss_reduction="sum",
            criterion=nn.MSELoss(reduction="sum"),
            backend="eager",
            **options,
        )
        self.view, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.place = "grad" if mode == "ghost" else "grad_sample"
        if isinstance(self.loader.batch_sampler, UniformWithReplacementSampler):
            self.loader.batch_sampler.__class__, self.loader.batch_sampler.batches = Drawn, []
        self.releases: list[list[int]] = []

    def parts(self) -> Any:
        manager = BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=PHYSICAL, optimizer=self.optimizer
        )
        return manager.__enter__()

    def backward(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.view(x).sum() * 1000).backward()

    def step(self) -> bool:
        """Return whether it released something."""
        before, steps = self.model.weight.detach().clone(), self.counted()
        self.optimizer.step()
        if self.counted() == steps:
            assert self.model.weight.equal(before)
            return False
        counts = (before - self.model.weight.detach())[0].round().int()
        assert counts.ge(0).all() and counts.le(1).all(), f"a sample counts more than once: {counts.tolist()}"
        self.releases.append(counts.nonzero().flatten().tolist())
        return True

    def take(self, part: Any) -> bool:
        self.backward(part[0])
        return self.step()

    def counted(self) -> int:
        return sum(steps for *_, steps in self.engine.accountant.history)

    def spoil(self) -> None:
        getattr(self.model.weight, self.place).mul_(1.5)

    def check(self, complete: bool = False) -> None:
        """Each release is of one batch."""
        left = [set(batch) for batch in self.loader.batch_sampler.batches]
        for release in self.releases:
            while left and not (set(release) == left[0] if complete else set(release) <= left[0]):
                left.pop(0)
            assert left, f"{release} is of no batch: {self.loader.batch_sampler.batches}, {self.releases}"
            left.pop(0)


def test_undisturbed_parts_are_whole_batches() -> None:
    run = Run("ghost")
    for _ in range(3):
        for part in run.parts():
            run.take(part)
    assert run.releases == run.loader.batch_sampler.batches and run.counted() == 3 * ROWS // BATCH


@MODES
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("at", range(3))
def test_a_refused_step_then_the_next_part(at: int, seed: int, mode: str) -> None:
    run = Run(mode, seed)
    for epoch in range(3):
        for k, (x, _) in enumerate(run.parts()):
            run.backward(x)
            if not epoch and k == at:
                run.spoil()
                with pytest.raises(UnaccountedGrad, match="is not what the last backward"):
                    run.step()
                run.optimizer.zero_grad()
                continue
            run.step()
    run.check()
    assert run.releases[-4:] == run.loader.batch_sampler.batches[-4:]


@MODES
@pytest.mark.parametrize("at", range(4))
def test_a_refused_step_then_the_same_part_again(at: int, mode: str) -> None:
    """What the virtual steps before it have left is dropped; later parts and batches are as ever."""
    run = Run(mode, 3)
    for k, part in enumerate(run.parts()):
        if k == at:
            run.backward(part[0])
            run.spoil()
            with pytest.raises(UnaccountedGrad, match="is not what the last backward"):
                run.step()
            run.optimizer.zero_grad()
        run.take(part)
    run.check()
    assert len(run.releases) == ROWS // BATCH
    assert at or run.releases == run.loader.batch_sampler.batches


class Broken(Exception):
    """Of the user's own code."""


@MODES
@pytest.mark.parametrize("workers", [0, 1])
def test_a_part_without_a_step(workers: int, mode: str) -> None:
    run = Run(mode, 1, num_workers=workers)
    refused = 0
    for epoch in range(3):
        for k, part in enumerate(run.parts()):
            if not epoch and k == 1:
                continue
            try:
                run.take(part)
            except UnaccountedGrad as error:
                assert "1 part of BatchMemoryManager had no step" in error.sentence
                assert error.where and error.path and "optimizer.zero_grad()" in error.advice
                refused += 1
    run.check()
    assert refused == 1 and run.releases[-4:] == run.loader.batch_sampler.batches[-4:]


@MODES
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("at", [0, 1])
def test_a_loop_that_is_left_early(at: int, workers: dict[str, Any], mode: str) -> None:
    run = Run(mode, 2, **workers)
    parts = run.parts()
    for epoch in range(3):
        for k, part in enumerate(parts):
            run.take(part)
            if not epoch and k == at:
                break
    run.check(complete=True)
    assert run.releases[-4:] == run.loader.batch_sampler.batches[-4:]


@MODES
def test_an_exception_whose_traceback_keeps_the_loop(mode: str) -> None:
    """As in a notebook."""
    run = Run(mode, 2, num_workers=1)

    def train() -> None:
        for part in run.parts():
            run.take(part)
            raise Broken("mine")

    with pytest.raises(Broken, match="mine") as caught:
        train()
    for part in run.parts():
        run.take(part)
    run.check(complete=True)
    assert run.releases == run.loader.batch_sampler.batches[-2:] and caught.traceback


def left_after_one_part(run: Run) -> Any:
    iterator = iter(run.parts())
    while run.take(next(iterator)):
        pass
    return iterator


@MODES
@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_behind_a_loop_that_was_left(workers: int, mode: str) -> None:
    run = Run(mode, 2, num_workers=workers)
    left_after_one_part(run)
    x = torch.eye(ROWS)
    run.backward(x)
    with pytest.raises(UnaccountedGrad, match=r"left before its last part|a loop over .* that has ended"):
        run.step()
    run.backward(x)
    assert run.step() and run.releases[-1] == list(range(ROWS))


@MODES
def test_two_steps_for_one_part(mode: str) -> None:
    run = Run(mode, 2, num_workers=1)
    for k, part in enumerate(run.parts()):
        run.take(part)
        if not k:
            run.backward(part[0])
            with pytest.raises(UnaccountedGrad, match="this step is for no part"):
                run.step()
            run.optimizer.zero_grad()
    run.check()


@MODES
def test_a_list_of_the_parts(mode: str) -> None:
    run = Run(mode, 2)
    part, *_ = list(run.parts())
    run.backward(part[0])
    with pytest.raises(UnaccountedGrad, match="a loop over BatchMemoryManager's loader that has ended"):
        run.step()


@MODES
def test_two_loops_in_turns(mode: str) -> None:
    run = Run(mode, 2)
    one, other = iter(run.parts()), iter(run.parts())
    run.take(next(one))
    run.take(next(other))
    run.backward(next(one)[0])
    with pytest.raises(UnaccountedGrad, match="the parts of two loops come in turns"):
        run.step()
    run.check()


@MODES
def test_signals_of_the_user_s_own(mode: str) -> None:
    run = Run(mode)
    x = torch.eye(ROWS)
    run.optimizer.signal_skip_step(True)
    run.optimizer.signal_skip_step(False)
    run.backward(x[:2])
    with pytest.raises(UnaccountedGrad, match="2 signals of signal_skip_step wait for one step") as caught:
        run.step()
    assert caught.value.where and caught.value.path and caught.value.advice
    for skip, rows in (True, x[:2]), (False, x[2:4]):
        run.backward(rows)
        run.optimizer.signal_skip_step(skip)
        run.step()
    assert run.releases == [[0, 1, 2, 3]]


@MODES
@pytest.mark.parametrize("last", [False, None])
def test_a_refused_last_step_ends_its_batch(last: bool | None, mode: str) -> None:
    """The next batch begins anew, although Opacus would add it to what the virtual steps have left."""
    run = Run(mode)
    x = torch.eye(ROWS)

    def batch(spoiled: bool) -> None:
        for skip in True, last:
            run.backward(x[: 2 if skip else 4])
            if skip is not None:
                run.optimizer.signal_skip_step(skip)
            if spoiled and not skip:
                run.spoil()
                with pytest.raises(UnaccountedGrad, match="is not what the last backward"):
                    run.step()
                run.optimizer.zero_grad()
            else:
                run.optimizer.step()

    batch(spoiled=True)
    assert vars(run.model.weight)["summed_grad"] is None and not run.counted()
    start = run.model.weight.detach().clone()
    batch(spoiled=False)
    assert run.counted() == 1
    assert (start - run.model.weight.detach())[0].round().tolist() == [2, 2, 1, 1] + [0] * (ROWS - 4)


@MODES
def test_a_step_hook_that_raises(mode: str) -> None:
    run = Run(mode, 2)

    def once(_: Any) -> None:
        if not calls:
            calls.append(1)
            raise Broken

    calls: list[int] = []
    run.optimizer.attach_step_hook(once)
    for part in run.parts():
        try:
            run.take(part)
        except Broken:
            run.optimizer.zero_grad()
    run.check()
    assert calls and run.counted() == 2


SMALL = torch.finfo(torch.float64).eps


@MODES
@pytest.mark.parametrize("write", [lambda c: c.fill_(0.76), lambda c: c.mul_(1 + SMALL)])
def test_another_c_that_is_printed_alike(write: Callable[[torch.Tensor], Any], mode: str) -> None:
    bound = torch.tensor(0.84, dtype=torch.float64)
    run = Run(mode, max_grad_norm=bound, noise_multiplier=1.0)
    torch.set_printoptions(precision=1)
    try:
        run.optimizer.signal_skip_step(True)
        run.backward(torch.eye(ROWS)[:4])
        run.optimizer.step()
        write(bound)
        run.backward(torch.eye(ROWS)[4:])
        with pytest.raises(UnaccountedGrad, match=r"p\.summed_grad is not what the virtual steps"):
            run.optimizer.step()
    finally:
        torch.set_printoptions(profile="default")


def test_empty_batches_are_parts() -> None:
    run = Run("ghost", 4)
    run.loader.batch_sampler.sample_rate = 0.05
    for _ in range(4):
        for part in run.parts():
            run.take(part)
    assert run.releases == run.loader.batch_sampler.batches and [] in run.releases
