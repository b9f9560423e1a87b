"""What a step costs beside its kernels: ``python -m benchmarks.calls [--parameters 1 10 100 500] [--profile]``.

The models multiply by n scalar parameters, so a step is overhead. The plain and the private compiled step
(`ClippedGrad`, whose guard on p.grad is part of it) take turns in one process, through Inductor. The figures are
microseconds and the calls of Python functions in one step.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import fxgrad

STEPS_OF_A_PROFILE = 200


class Scalars(nn.Module):
    """A product of its input with n scalar parameters."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.scalars = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i / n)) for i in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for scalar in self.scalars:
            x = x * scalar
        return x


def steps_of(n: int, backend: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the plain and the private step of a model with n scalar parameters."""
    plain, private = Scalars(n), fxgrad.transform(Scalars(n), quantity=fxgrad.ClippedGrad(1.0), backend=backend)
    x = torch.randn(2, 1)
    compiled = torch.compile(plain, backend=backend)

    def step(model: Callable[[Tensor], Tensor], of: nn.Module) -> Callable[[], None]:
        parameters = list(of.parameters())

        def run() -> None:
            for parameter in parameters:
                parameter.grad = None
            model(x).sum().backward()

        return run

    return step(compiled, plain), step(private, private)


def times_in_turn(steps: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Return the seconds of each step, which take turns."""
    times: list[list[float]] = [[] for _ in steps]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for step, seconds in zip(steps, times, strict=True):
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def calls_of(step: Callable[[], None]) -> int:
    """Count the Python functions that a step calls."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def profile(step: Callable[[], None], lines: int) -> None:
    """Print where a step's Python time goes, builtins included."""
    profiler = cProfile.Profile(builtins=True)
    profiler.enable()
    for _ in range(STEPS_OF_A_PROFILE):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def line(n: int, arguments: argparse.Namespace) -> str:
    """Return one row of the table."""
    plain, private = steps_of(n, arguments.backend)
    for step in (plain, private):
        for _ in range(10):
            step()
    if arguments.profile:
        profile(plain, arguments.profile)
        profile(private, arguments.profile)
    cells: list[str] = []
    times = times_in_turn((plain, private), arguments.rounds)
    for figure in (min, statistics.median):
        of_plain, of_private = (1e6 * figure(seconds) for seconds in times)
        cells += [f"{of_plain:.0f}", f"{of_private:.0f}", f"{of_private - of_plain:.0f}"]
    return f"| {' | '.join(map(str, (n, *cells, calls_of(plain), calls_of(private))))} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--parameters", nargs="+", type=int, default=[1, 10, 100, 500])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="print so many lines of a profile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = [f"{figure}: {what}" for figure in ("least", "median") for what in ("plain", "private", "more")]
    print(f"| n | {' | '.join((*figures, 'calls of plain', 'calls of private'))} |")
    print("|---" * (len(figures) + 3) + "|")
    for n in arguments.parameters:
        print(line(n, arguments), flush=True)


if __name__ == "__main__":
    main()
