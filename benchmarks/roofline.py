"""What this machine can do at best, and what that means for a quantity.

G cannot take less than the step without weight gradients, plus the weight gradients' products at the speed of
large matrices, plus writing B * |P| numbers. N cannot take less than the step without weight gradients (a norm
may need none of them), C not less than the whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.tasks import Quantity, Task, Training

MATRIX = 2048
STORED = 1 << 28  # bytes; far more than the caches hold
REPETITIONS = 7


@dataclass(frozen=True)
class Rates:
    """Measured in float32: products of large matrices, and writing memory that is there."""

    flops_per_second: float
    stored_bytes_per_second: float

    def best(self, other: Rates | None) -> Rates:
        """The larger of each: what else runs on a machine only lowers them."""
        if other is None:
            return self
        flops = max(self.flops_per_second, other.flops_per_second)
        return Rates(flops, max(self.stored_bytes_per_second, other.stored_bytes_per_second))


@dataclass(frozen=True)
class Work:
    """Floating-point operations of the ordinary step, and of its weight gradients alone."""

    step: int
    weight_gradients: int


def measure_rates(device: str) -> Rates:
    """The best of a few repetitions of each."""
    a, b = (torch.randn(MATRIX, MATRIX, device=device) for _ in range(2))
    product = torch.empty_like(a)
    target = torch.empty(STORED // 4, device=device)
    return Rates(
        2 * MATRIX**3 / _best_seconds(lambda: torch.mm(a, b, out=product)),
        STORED / _best_seconds(lambda: target.fill_(1.0)),
    )


def count_work(task: Task) -> Work | None:
    """By PyTorch's flop counter, on one sample; None where it does not know the model's ops.

    A weight gradient takes as many operations as the op that used the weight, attention aside.
    """
    training, x, y = Training(task.model, task.losses), task.x[:1], task.y[:1]
    with FlopCounterMode(display=False) as forward:
        loss = training(x, y)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(loss, list(task.model.parameters()))
    by_op = forward.get_flop_counts().get("Global", {})
    weights = sum(flops for op, flops in by_op.items() if "attention" not in str(op) and "bmm" not in str(op))
    step = forward.get_total_flops() + backward.get_total_flops()
    return Work(len(task.x) * step, len(task.x) * weights) if weights and task.compiled else None


def floor_ratio(task: Task, quantity: Quantity, work: Work | None, rates: Rates, plain_seconds: float) -> float | None:
    """The least that a quantity can take, as a ratio to the plain step as measured."""
    if quantity == "C":
        return 1.0
    if work is None:
        return None
    without = 1 - work.weight_gradients / work.step
    if quantity == "N":
        return without
    products = work.weight_gradients / rates.flops_per_second
    stores = task.grad_sample_bytes / rates.stored_bytes_per_second
    return without + (products + stores) / plain_seconds


def _best_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
