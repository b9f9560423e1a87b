"""One of two processes that train for many random steps: `python -m tests.chaos_sharded RANK FOLDER`.

Batches differ in size and may be empty, parameters are frozen and trained again, gradients accumulate, and code of the
user's raises in one process, which goes on: at random and the same on both processes. Each step is compared with the
loop over the samples of both.
"""

from __future__ import annotations

import copy
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import FxgradError
from tests.sharded_processes import WORLD, C, assert_grads, clipped_sum, ids, loss, main, tied, units

FROZEN: tuple[tuple[str, ...], ...] = (
    (),
    ("table.weight",),
    ("blocks.0.up.weight", "blocks.2.norm.bias"),
    ("blocks.1.",),
)
"""What is frozen: nothing, the table that is also the head, parts of units, a whole unit."""


FAULTS = ("data", "forward", "loss", "backward")
"""Where one process raises.

    data        before its call: it goes on with an empty batch
    forward     within its call: both learn it, and call again
    loss        behind its call: it goes on with a loss that is 0
    backward    as its backward begins: it calls backward again
"""


class Raised(Exception):
    """An error in code of the user's."""


class Chaos:
    """A sharded model in training beside one that the loop trains."""

    def __init__(self, seed: int, backend: str) -> None:
        self.random = random.Random(seed)
        self.model: Any = tied()
        self.alone = copy.deepcopy(self.model)
        self.private: Any = fxgrad.transform(units(self.model), quantity=fxgrad.ClippedGrad(C), backend=backend)
        self.optimizer = torch.optim.AdamW(self.private.parameters(), lr=0.01)
        self.other = torch.optim.AdamW(self.alone.parameters(), lr=0.01)
        self.units = [self.private, *cast(Any, self.model).blocks]
        self.seen: Counter[str] = Counter()  # batches, and what happened in them
        self.errors: dict[str, float] = {}  # the largest

    def freeze(self) -> None:
        parts = self.random.choice(FROZEN)
        for model in (self.private, self.alone):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(parts))

    def backward(self, rank: int, seed: int) -> None:
        """Add one batch's clipped sum to p.grad, of processes that meet in it or wait for the next."""
        batch = ids([self.random.choice((0, 0, 1, 2, 3, 5, 7)) for _ in range(WORLD)], seed)
        if self.random.random() < 0.2:
            with torch.no_grad():
                assert torch.allclose(self.private(batch[rank]), self.alone(batch[rank]), rtol=0, atol=1e-9)
        fault = self.random.choice(FAULTS) if self.random.random() < 0.3 else "none"
        where = self.random.randrange(WORLD)
        self.seen.update([fault, *("empty" for x in batch if not len(x)), "batches"])
        mine = fault if rank == where else "none"
        self.go_on(batch[rank][:0] if mine == "data" else batch[rank], mine, agree=fault == "forward")
        if fault in ("data", "loss"):
            batch[where] = batch[where][:0]
        add(self.alone, torch.cat(batch))

    def go_on(self, x: Tensor, fault: str, agree: bool) -> None:
        """Make one call and its backward, past what raises."""
        raised = torch.tensor(False)
        if fault == "forward":
            raised = raises(IndexError, lambda: self.private(torch.full((2, 4), 99)))
        else:
            outputs = self.private(x)
        if agree:
            dist.all_reduce(raised, dist.ReduceOp.MAX)
            assert raised
            outputs = self.private(x)
        if fault == "backward":
            hook = outputs.register_hook(fail)
            assert raises(Raised, lambda: loss(outputs).backward())
            hook.remove()
        (outputs.sum() * 0 if fault == "loss" else loss(outputs)).backward()

    def step(self, rank: int, seed: int) -> None:
        self.optimizer.zero_grad()
        self.other.zero_grad()
        backwards = self.random.choice((1, 1, 1, 2, 3))
        reduces_once = self.random.random() < 0.5
        for i in range(backwards):
            if self.random.random() < 0.3 and not (i and reduces_once):
                self.freeze()
            for unit in self.units:
                unit.set_requires_gradient_sync(not reduces_once or i == backwards - 1, recurse=False)
            self.backward(rank, 10 * seed + i)
        grads = {name: p.grad for name, p in self.alone.named_parameters() if p.grad is not None}
        assert_grads(self.private, grads)
        self.optimizer.step()
        self.other.step()
        for (name, p), q in zip(self.private.named_parameters(), self.alone.parameters(), strict=True):
            if name in grads:
                self.note("grad", p.grad.full_tensor() - grads[name])
            self.note("parameter", p.full_tensor() - q)
            assert torch.allclose(p.full_tensor(), q, rtol=0, atol=1e-9), name
            q.data.copy_(p.full_tensor())  # Adam's first steps enlarge a rounding error

    def note(self, what: str, difference: Tensor) -> None:
        self.errors[what] = max(self.errors.get(what, 0.0), float(difference.detach().abs().max()))


def fail(grad: Tensor) -> None:
    raise Raised


def raises(error: type[Exception], run: Callable[[], object]) -> Tensor:
    """Return whether code raises."""
    try:
        run()
    except error:
        return torch.tensor(True)
    return torch.tensor(False)


def add(model: nn.Module, x: Tensor) -> None:
    """Add the clipped sum to p.grad of what is trained."""
    for name, grad in clipped_sum(model, x).items():
        parameter = model.get_parameter(name)
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def run(rank: int, steps: int, backend: str) -> None:
    chaos, began = Chaos(0, backend), time.monotonic()
    for seed in range(steps):
        try:
            chaos.step(rank, seed)
        except Exception as error:
            raise AssertionError(f"in step {seed}") from error
    seconds = time.monotonic() - began
    print(f"{backend}: {steps} steps, {seconds:.0f} s, {dict(chaos.seen)}, errors {chaos.errors}", flush=True)


RUNS: dict[str, Callable[[int], None]] = {
    "short": partial(run, steps=12, backend="eager"),
    "long eager": partial(run, steps=200, backend="eager"),
    "long aot_eager": partial(run, steps=200, backend="aot_eager"),
}


def refuse(rank: int, folder: Path, case: str) -> None:
    """Process 0 refuses its second step and ends; process 1 learns it from what it waits for."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=WORLD)
    quantity = fxgrad.ClippedGrad(C, nonfinite="raise")
    private = fxgrad.transform(units(tied()), quantity=quantity, backend="eager")
    batch = ids((2, 3))
    loss(private(batch[rank])).backward()
    private.zero_grad()
    began = time.monotonic()
    try:
        if rank == 0 and case == "call":
            private(batch[0], sample_weight=torch.ones(2))
        scale = torch.inf if rank == 0 else 1.0
        loss(private(batch[rank]) * scale).backward()
        loss(private(batch[rank])).backward()
    except FxgradError as error:
        said = str(error)
    torch.save({case: said, "seconds": time.monotonic() - began}, folder / f"{rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[3] in ("call", "backward"):
        refuse(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    else:
        main(int(sys.argv[1]), Path(sys.argv[2]), RUNS)
