"""DistributedDataParallel's own options around a transformed model, in one of the two processes of two_processes.py.

Each case trains for a few steps beside one process that has the samples of both, and is "" or the traceback.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxgrad
from fxgrad.errors import OptionError

WORLD, C = 2, 0.3
CASES: dict[str, Callable[[int], None]] = {}
SIZES = ((4, 4), (3, 5), (0, 6), (2, 0), (0, 0), (5, 1))


def case(run: Callable[[int], None]) -> Callable[[int], None]:
    CASES[run.__name__] = run
    return run


class Net(nn.Module):
    """A layer that every forward uses, one that some use, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(()))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.scale).tanh()
        return self.head(x if self.skips else self.second(x).tanh())


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def loss(y: Tensor) -> Tensor:
    return y.square().sum()


def batches(sizes: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
    """Return each step's samples of each process, the same on both."""
    seeded = torch.Generator().manual_seed(1)
    return [torch.randn(sum(each), 3, dtype=torch.float64, generator=seeded).split(list(each)) for each in sizes]


class Pair:
    """A transformed model in DistributedDataParallel, and one of a process with all samples."""

    def __init__(self, backend: str = "eager", **options: Any) -> None:
        quantity = fxgrad.ClippedGrad(C)
        self.model, self.alone = net(), net()
        self.ddp = DistributedDataParallel(fxgrad.transform(self.model, quantity=quantity, backend=backend), **options)
        self.whole = fxgrad.transform(self.alone, quantity=quantity, backend=backend)
        self.optimizer, self.other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.model, self.alone))

    def backward(self, rank: int, batch: Sequence[Tensor]) -> None:
        loss(self.ddp(batch[rank])).backward()
        loss(self.whole(torch.cat(list(batch)))).backward()

    def step(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.alone.parameters(), strict=True):
            if q.grad is not None:
                q.grad /= WORLD
            ours, theirs = (torch.zeros_like(p) if one.grad is None else one.grad for one in (p, q))
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-10), (name, ours, theirs)
        self.optimizer.step()
        self.other.step()
        self.optimizer.zero_grad()
        self.other.zero_grad()
        self.equal()

    def equal(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.alone.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-10), name


def refused(part: str, run: Callable[[], Any]) -> None:
    try:
        run()
    except OptionError as error:
        assert part in str(error), str(error)
        return
    raise AssertionError(f"accepted: {part}")


def trains(rank: int, **options: Any) -> None:
    pair = Pair(**options)
    for batch in batches(SIZES):
        pair.backward(rank, batch)
        pair.step()


@case
def empty_batches(rank: int) -> None:
    trains(rank, backend="aot_eager")


@case
def gradient_as_bucket_view(rank: int) -> None:
    trains(rank, gradient_as_bucket_view=True)


@case
def static_graph(rank: int) -> None:
    """DDP averages behind the first backward, before the guard has looked; without a guard it is as elsewhere."""
    pair = Pair(static_graph=True)
    batch = batches([(3, 3)])[0]
    refused("static_graph=True averages gradients before fxgrad can compare", lambda: pair.ddp(batch[rank]))
    for quantity in (fxgrad.GradSample(), fxgrad.NormSample()):
        model, alone = net(), net()
        ddp = DistributedDataParallel(fxgrad.transform(model, quantity=quantity, backend="eager"), static_graph=True)
        whole = fxgrad.transform(alone, quantity=quantity, backend="eager")
        for both in batches([(3, 3), (3, 3), (4, 2)]):
            fxgrad.zero_grad(ddp.module)
            fxgrad.zero_grad(whole)
            loss(ddp(both[rank])).backward()
            loss(whole(torch.cat(both))).backward()
            mine = slice(0, len(both[0])) if rank == 0 else slice(len(both[0]), None)
            if isinstance(quantity, fxgrad.NormSample):
                assert torch.allclose(fxgrad.result(ddp.module, quantity), fxgrad.result(whole, quantity)[mine])
                continue
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                ours, theirs = (one.grad_sample for one in (p, q))  # type: ignore[attr-defined]
                assert torch.allclose(ours, theirs[mine], rtol=0, atol=1e-10), name


@case
def find_unused_parameters(rank: int) -> None:
    """A layer that a forward leaves out, on both processes, or on one."""
    pair = Pair(find_unused_parameters=True)
    for batch, skips in zip(batches(SIZES), (False, True, False, True, True, False), strict=True):
        pair.model.skips = pair.alone.skips = skips
        pair.backward(rank, batch)
        pair.step()


@case
def find_unused_parameters_of_one_process(rank: int) -> None:
    pair = Pair(find_unused_parameters=True)
    batch = batches([(4, 3)])[0]
    pair.model.skips = rank == 1
    loss(pair.ddp(batch[rank])).backward()
    for i in range(WORLD):
        pair.alone.skips = i == 1
        loss(pair.whole(batch[i])).backward()
    pair.step()


@case
def broadcast_buffers(rank: int) -> None:
    for broadcast in (True, False):
        pair = Pair(broadcast_buffers=broadcast)
        batch = batches([(4, 3)])[0]
        pair.model.scale.fill_(2.0 + rank)
        loss(pair.ddp(batch[rank])).backward()
        for i in range(WORLD):
            pair.alone.scale.fill_(2.0 if broadcast else 2.0 + i)
            loss(pair.whole(batch[i])).backward()
        pair.step()


@case
def no_sync(rank: int) -> None:
    for views in (False, True):
        pair = Pair(gradient_as_bucket_view=views)
        for i, batch in enumerate(batches(SIZES)):
            last = i % 3 == 2
            with contextlib.nullcontext() if last else pair.ddp.no_sync():
                pair.backward(rank, batch)
            if last:
                pair.step()


@case
def join(rank: int) -> None:
    """Process 1 has more batches; what it clips alone is divided by both processes, too."""
    pair = Pair()
    steps = batches([(4, 3), (2, 5), (0, 4), (0, 0), (0, 2)])
    with pair.ddp.join():
        for batch in steps[: 2 if rank == 0 else 5]:
            loss(pair.ddp(batch[rank])).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
    for batch in steps:
        loss(pair.whole(torch.cat(batch))).backward()
        for q in pair.alone.parameters():
            assert q.grad is not None
            q.grad /= WORLD
        pair.other.step()
        pair.other.zero_grad()
    pair.equal()


def every_case(rank: int) -> dict[str, str]:
    found = {}
    for name, run in CASES.items():
        try:
            run(rank)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            print(found[name], flush=True)  # if the processes do not meet again
        failed = torch.tensor(bool(found[name]))
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:  # the other may wait in a collective
            break
    return found
