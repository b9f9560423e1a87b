"""One peer on one model: times in paired rounds, peak memory, compile time, and the check of the results."""

import contextlib
import gc
import importlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch._dynamo.utils import counters
from tqdm import tqdm

from benchmarks.memory import peak_bytes
from benchmarks.peers import PEERS, ours
from benchmarks.peers.engine import Engine
from benchmarks.reference import TOLERANCES, Reference
from benchmarks.results import CONTROL, FXGRAD, PLAIN, STEP, CompileRecord, Interval, Record
from benchmarks.roofline import Rates, count_work, floor_ratio
from benchmarks.tasks import Quantity, Task

MEMORY_ALLOWANCE = 1.1  # times B * |P| * itemsize, above the plain step's peak
FEWEST_ROUNDS = 25
LONG_ROUND = 1.0  # seconds; above it there are fewer rounds
SHORT_TURN = 0.01  # seconds; a shorter step is taken several times in its turn
BOOTSTRAP_SAMPLES = 4000


class Comparison:
    """One peer beside the plain step and fxgrad, in this process."""

    def __init__(self, task: Task, peer: str, rounds: int, seed: int = 0, rates: Rates | None = None) -> None:
        self.task, self.peer, self.rounds, self.seed, self.rates = task, peer, rounds, seed, rates
        self.reference = Reference(task)
        self.work = count_work(task) if rates else None

    def compare(self, quantity: Quantity) -> Record:
        """The record of one quantity; a peer that fails is reported, not dropped."""
        gc.collect()  # what an earlier quantity held
        try:
            return self._measure(quantity) if self.rounds else self._check(quantity)
        except Exception as reason:
            return Record(self.task.name, self.peer, quantity, failed=describe(reason))

    @cached_property
    def plain(self) -> tuple[str, Engine]:
        """The faster plain step of the eager and the compiled one, warm; one for all quantities."""
        engines = {"eager": ours.plain(self.task, compiled=False)}
        if self.task.compiled:
            engines["compiled"] = ours.plain(self.task)
        for engine in engines.values():
            warm_up(self.task, engine)
        times = time_rounds(self.task, engines, FEWEST_ROUNDS, "plain", self.seed)
        faster = min(engines, key=lambda name: statistics.median(times[name]))
        return faster, engines[faster]

    def _check(self, quantity: Quantity) -> Record:
        """Whether the results are right, without a time."""
        engine, seconds, graphs = self._first_step(quantity)
        error = self._error(quantity, engine)
        return Record(self.task.name, self.peer, quantity, error=error, first_step_seconds=seconds, graphs=graphs)

    def _measure(self, quantity: Quantity) -> Record:
        plain, engine = self.plain
        task, peer, engines = self.task, self.peer, {PLAIN: engine}
        engines[peer], first_step_seconds, graphs = self._first_step(quantity)
        warm_up(task, engines[peer])
        fxgrad_failed = self._add(FXGRAD, quantity, engines) or self._add(STEP, quantity, engines)
        controlled = engines | {CONTROL: engines[PLAIN]}
        times = time_rounds(task, controlled, self.rounds, f"{peer} {quantity}", self.seed)
        error = self._error(quantity, engines[peer])  # of the last step that was timed
        for name in {FXGRAD, STEP} & engines.keys() - {peer}:
            try:
                self._error(quantity, engines[name])
            except AssertionError as reason:
                fxgrad_failed = describe(reason)
        peaks = {name: peak_bytes(task, engine) for name, engine in engines.items()}
        paired = peer not in (FXGRAD, STEP) and fxgrad_failed is None
        allowance = int(MEMORY_ALLOWANCE * task.grad_sample_bytes) if quantity == "G" else 0
        return Record(
            task.name,
            peer,
            quantity,
            rounds=len(times[PLAIN]),
            plain=plain,
            milliseconds={name: _quartiles(values) for name, values in times.items()},
            ratio=median_ratio(times[peer], times[PLAIN]),
            control=median_ratio(times[CONTROL], times[PLAIN]),
            fxgrad_ratio=median_ratio(times[FXGRAD], times[peer]) if paired else None,
            step_ratio=median_ratio(times[STEP], times[peer]) if paired else None,
            fxgrad_failed=fxgrad_failed,
            error=error,
            peak_bytes=peaks,
            allowed_bytes=peaks[PLAIN] + allowance,
            first_step_seconds=first_step_seconds,
            graphs=graphs,
            floor=self._floor(quantity, statistics.median(times[PLAIN])),
        )

    def _first_step(self, quantity: Quantity) -> tuple[Engine, float, int]:
        """The peer's engine after one step, that step's seconds, and the graphs it compiled."""
        before = counters["stats"]["unique_graphs"]
        engine = PEERS[self.peer](self.task, quantity)
        seconds = timed(self.task, engine.step)
        return engine, seconds, counters["stats"]["unique_graphs"] - before

    def _add(self, ours: str, quantity: Quantity, engines: dict[str, Engine]) -> str | None:
        """Put fxgrad beside another peer; its error where it fails."""
        if self.peer in (FXGRAD, STEP):
            return None
        try:
            engine = PEERS[ours](self.task, quantity)
            warm_up(self.task, engine)
        except Exception as reason:
            return describe(reason)
        engines[ours] = engine
        return None

    def _error(self, quantity: Quantity, engine: Engine) -> float:
        error = self.reference.error(quantity, engine.results(), engine.weights() if engine.weights else None)
        if not error <= TOLERANCES[quantity]:
            raise AssertionError(f"wrong by {error:.1e}")
        return error

    def _floor(self, quantity: Quantity, plain_seconds: float) -> float | None:
        if self.rates is None:
            return None
        return floor_ratio(self.task, quantity, self.work, self.rates, plain_seconds)


def first_step(task: Task, peer: str, quantity: Quantity) -> CompileRecord:
    """Time the first step, compilation included; meant for a fresh process without caches."""
    importlib.import_module("torch._inductor.compile_fx")  # imports are not compile time
    engine = ours.plain(task) if peer == PLAIN else PEERS[peer](task, quantity)
    seconds = timed(task, engine.step)
    pass_seconds = ours.pass_seconds() if peer == FXGRAD else None
    return CompileRecord(task.name, peer, quantity, seconds, pass_seconds, counters["stats"]["unique_graphs"])


def warm_up(task: Task, engine: Engine, limit: int = 20) -> None:
    """Step until three steps take as long as the three before them, within 5 %."""
    times: list[float] = []
    while len(times) < limit:
        times.append(timed(task, engine.step))
        before, after = times[-6:-3], times[-3:]
        if before and statistics.median(after) > 0.95 * statistics.median(before):
            return


def time_rounds(task: Task, engines: dict[str, Engine], rounds: int, label: str, seed: int) -> dict[str, list[float]]:
    """Seconds of each engine's step in each round; every engine has one turn in a round, in random order."""
    rng = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in engines}
    seconds = [timed(task, engine.step) for engine in engines.values()]
    round_seconds, steps = sum(seconds), math.ceil(SHORT_TURN / max(seconds))
    if round_seconds > LONG_ROUND:
        rounds = min(rounds, max(FEWEST_ROUNDS, round(rounds * LONG_ROUND / round_seconds)))
    with _no_collection():
        for _ in tqdm(range(rounds), desc=f"{task.name} {label}", leave=False):
            gc.collect()
            for name in rng.sample(list(engines), len(engines)):
                if steps > 1:  # it finds cold caches, but where the control, the same engine, had the turn before
                    engines[name].step()
                times[name].append(timed(task, engines[name].step, steps))
    return times


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection of Python's own choosing; what lives now is not looked at by ours either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def median_ratio(numerator: list[float], denominator: list[float]) -> Interval:
    """The median of the paired ratios with its 95 % bootstrap interval."""
    ratios = torch.tensor([a / b for a, b in zip(numerator, denominator, strict=True)])
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ratios), (BOOTSTRAP_SAMPLES, len(ratios)), generator=generator)
    medians = ratios[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(0.025), medians.quantile(0.975)
    return Interval(float(ratios.quantile(0.5)), float(low), float(high))


def timed(task: Task, step: Callable[[], None], steps: int = 1) -> float:
    """Seconds of one step, the mean of several, the device's work included."""
    _synchronize(task)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(task)
    return (time.perf_counter() - start) / steps


def _synchronize(task: Task) -> None:
    if task.x.is_cuda:
        torch.cuda.synchronize()


def _quartiles(seconds: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles([1e3 * s for s in seconds], n=4, method="inclusive")
    return low, middle, high


def describe(reason: Exception) -> str:
    """An error as one line."""
    lines = str(reason).strip().splitlines() or [""]
    return f"{type(reason).__name__}: {lines[0]}"[:200]
