"""Each way to contract a weight's gradients, timed: ``python -m benchmarks.ways [linear] [conv] [table]``.

What `ClippedGrad` does with one weight: norms with their bounds, and the weighted sum. The last columns are the ways
that the cost model chooses on this machine as measured and kept, and on the reference machine; and how much slower each
is than the fastest.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxgrad.costs.choices import Planner
from fxgrad.costs.contractions import costs
from fxgrad.costs.machines import REFERENCE, Machine, machine_of
from fxgrad.gradients.sample_grads import SampleGrads, deferred
from fxgrad.kernels.settings import Settings
from fxgrad.terms import OneHot, Patches, Term
from fxgrad.terms.work import Way

LINEAR = [(32, k, d, d) for d in (64, 256, 1024) for k in (1, 16, 64, 256)]  # n, k, o, i
CONV = [(32, c, s, 1) for c in (32, 64, 128) for s in (8, 16, 32)]  # n, channels, pixels in a row, groups
CONV += [(32, 256, 4, 1), (32, 64, 16, 64), (32, 64, 16, 4)]
TABLE = [(32, 256, 10004, 16), (16, 64, 50257, 256), (32, 64, 100, 64), (32, 256, 50, 128)]  # n, k, rows, d

SLOW = 1.0  # estimated seconds from which a way is left out
ROUNDS = 20

Make = Callable[[Tensor, Tensor], Term]


@dataclass(frozen=True)
class Only(Planner):
    """No choice: one way."""

    way: Way = Way.MATERIALISE

    def of(self, name: str, term: Term, *, deferred: bool = False) -> Way:
        return self.way


def linear(n: int, k: int, o: int, i: int) -> tuple[Sequence[Tensor], Make, tuple[int, ...]]:
    return (torch.randn(n, k, o), torch.randn(n, k, i)), lambda g, x: Term("n...o,n...i->noi", g, x), (o, i)


def conv(n: int, channels: int, size: int, groups: int) -> tuple[Sequence[Tensor], Make, tuple[int, ...]]:
    kernel = (channels, channels // groups, 3, 3)
    settings = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), groups)

    def make(g: Tensor, x: Tensor) -> Term:
        return Term("nko...,nk...i->noi", g, Patches(x, kernel, settings))

    return (torch.randn(n, 1, channels, size, size), torch.randn(n, 1, channels, size, size)), make, kernel


def table(n: int, k: int, rows: int, d: int) -> tuple[Sequence[Tensor], Make, tuple[int, ...]]:
    operands = (torch.randint(rows, (n, k)), torch.randn(n, k, d))
    return operands, lambda ids, g: Term("n...v,n...d->nvd", OneHot(ids, rows), g), (rows, d)


def step(
    way: Way, make: Make, shape: tuple[int, ...], machine: Machine, operands: Sequence[Tensor]
) -> Callable[..., Any]:
    """One weight's part of a backward that clips, compiled; the machine says which library multiplies."""
    ways = Only(machine, way=way)

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        part = deferred(make(a, b).in_full_precision(), "w", ways)
        grads = SampleGrads("w", shape, torch.float32, len(a), b, [part], ways)
        norms = grads.norms()
        return norms, grads.weighted((1 / (norms[1] + 1e-6)).clamp(max=1).float())

    # Traced as AOTAutograd traces a backward: TorchDynamo sees nothing of it, and would break the graph.
    compiled: Callable[..., Any] = torch.compile(make_fx(run)(*operands), dynamic=False, fullgraph=True)
    return compiled


def least_seconds(steps: dict[Way, Callable[..., Any]], operands: Sequence[Tensor]) -> dict[Way, float]:
    """Of some rounds in random order: what else runs on a machine only adds to a time."""
    found = dict.fromkeys(steps, float("inf"))
    for round_ in range(ROUNDS + 3):
        for way in random.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[way](*operands)
            if round_ >= 3:
                found[way] = min(found[way], time.perf_counter() - start)
    return found


def line(kind: str, sizes: tuple[int, ...], machine: Machine) -> str:
    """One row of the table."""
    operands, make, shape = {"linear": linear, "conv": conv, "table": table}[kind](*sizes)
    term, n = make(*operands), sizes[0]
    prices = costs(term.contraction(), REFERENCE, n)
    steps = {way: step(way, make, shape, machine, operands) for way, price in prices.items() if price.seconds < SLOW}
    times = least_seconds(steps, operands)
    best = min(times.values())
    cells = [f"{1e3 * times[way]:.3g}" if way in times else "" for way in Way]
    for of in (machine, REFERENCE):
        way = Planner(of, batch=n).of("w", term)
        cells.append(f"{way.value} {times[way] / best:.2f}")
    return f"| {kind} {sizes} | {' | '.join(cells)} |"


def main(kinds: Sequence[str]) -> None:
    torch._dynamo.config.recompile_limit = 10_000
    machine = machine_of(torch.device("cpu"))  # as kept: what a user's process goes by
    print(f"{machine}\n{os.cpu_count()} processors, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(f"| use | {' | '.join(way.value for way in Way)} | chosen here | on the reference machine |")
    print("|---" * (len(Way) + 3) + "|")
    for kind, shapes in {"linear": LINEAR, "conv": CONV, "table": TABLE}.items():
        for sizes in shapes if kind in kinds or not kinds else []:
            print(line(kind, sizes, machine), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
