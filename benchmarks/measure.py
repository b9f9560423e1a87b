"""Times in paired rounds, peak memory, compile time, and the check that the results are right."""

import copy
import gc
import importlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.models import Task, loss
from benchmarks.peers import PEERS, Engine, fxgrad_pass_seconds, plain

TOLERANCE = 1e-4
MEMORY_ALLOWANCE = 1.1  # times B * |P| * itemsize, above the plain step's peak
CONTROL_RANGE = (0.97, 1.03)
FEWEST_ROUNDS = 25
BOOTSTRAP_SAMPLES = 4000

# The plain step runs twice in each round; the second against the first is the A/A control.
PLAIN, CONTROL, FXGRAD = "plain", "plain again", "fxgrad"


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """What was measured of one peer on one model, or why it failed."""

    model: str
    peer: str
    failed: str | None = None
    rounds: int = 0
    milliseconds: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    ratio: Interval | None = None  # peer / plain
    control: Interval | None = None  # plain / plain
    fxgrad_ratio: Interval | None = None  # fxgrad / peer, paired in the same rounds
    fxgrad_failed: str | None = None
    error: float | None = None  # largest difference from the loop over samples
    peak_bytes: dict[str, int] = field(default_factory=dict)
    allowed_bytes: int = 0

    @property
    def control_valid(self) -> bool:
        """Whether the plain step took as long as itself: else this machine was too noisy."""
        low, high = CONTROL_RANGE
        return self.control is not None and low <= self.control.median <= high


@dataclass(frozen=True)
class CompileRecord:
    """The first step of a fresh process: its seconds, fxgrad's share and the number of graphs."""

    seconds: float
    pass_seconds: float | None
    graphs: int


def compare(task: Task, peer: str, rounds: int, seed: int = 0) -> Record:
    """Measure one peer against the plain step, and fxgrad against both, in this process."""
    engines = {PLAIN: plain(task)}
    warm_up(task, engines[PLAIN])
    try:
        engines[peer] = _checked_engine(task, peer)
    except Exception as reason:  # a peer that fails is reported, not dropped
        return Record(task.name, peer, failed=_describe(reason))
    fxgrad_failed = None
    if peer != FXGRAD:
        try:
            engines[FXGRAD] = _checked_engine(task, FXGRAD)
        except Exception as reason:
            fxgrad_failed = _describe(reason)
    times = time_rounds(task, engines | {CONTROL: engines[PLAIN]}, rounds, peer, seed)
    error = largest_error(task, engines[peer].grads())
    if error > TOLERANCE:
        return Record(task.name, peer, failed=f"wrong by {error:.1e} after the rounds")
    peaks = {name: peak_bytes(task, engine) for name, engine in engines.items()}
    against = peer if FXGRAD in engines and peer != FXGRAD else None
    return Record(
        task.name,
        peer,
        rounds=len(times[PLAIN]),
        milliseconds={name: _quartiles(values) for name, values in times.items()},
        ratio=median_ratio(times[peer], times[PLAIN]),
        control=median_ratio(times[CONTROL], times[PLAIN]),
        fxgrad_ratio=median_ratio(times[FXGRAD], times[against]) if against else None,
        fxgrad_failed=fxgrad_failed,
        error=error,
        peak_bytes=peaks,
        allowed_bytes=peaks[PLAIN] + int(MEMORY_ALLOWANCE * task.grad_sample_bytes),
    )


def first_step(task: Task, peer: str) -> CompileRecord:
    """Time the first step, compilation included; meant for a fresh process without caches."""
    importlib.import_module("torch._inductor.compile_fx")  # imports are not compile time
    engine = plain(task) if peer == PLAIN else PEERS[peer](task)
    seconds = _timed(task, engine.step)
    pass_seconds = fxgrad_pass_seconds() if peer == FXGRAD else None
    return CompileRecord(seconds, pass_seconds, counters["stats"]["unique_graphs"])


def warm_up(task: Task, engine: Engine, limit: int = 20) -> None:
    """Step until three steps take as long as the three before them, within 5 %."""
    times: list[float] = []
    while len(times) < limit:
        times.append(_timed(task, engine.step))
        before, after = times[-6:-3], times[-3:]
        if before and statistics.median(after) > 0.95 * statistics.median(before):
            return


def time_rounds(
    task: Task, engines: dict[str, Engine], rounds: int, label: str, seed: int
) -> dict[str, list[float]]:
    """Seconds of each engine in each round; a round runs every engine once, in random order."""
    rng = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in engines}
    round_seconds = sum(_timed(task, engine.step) for engine in engines.values())
    if round_seconds > 1:
        rounds = min(rounds, max(FEWEST_ROUNDS, round(rounds / round_seconds)))
    gc.collect()
    gc.freeze()  # what lives now need not be looked at between the rounds
    gc.disable()
    for _ in tqdm(range(rounds), desc=f"{task.name} {label}", leave=False):
        gc.collect()
        for name in rng.sample(list(engines), len(engines)):
            times[name].append(_timed(task, engines[name].step))
    gc.enable()
    gc.unfreeze()
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> Interval:
    """The median of the paired ratios with its 95 % bootstrap interval."""
    ratios = torch.tensor([a / b for a, b in zip(numerator, denominator, strict=True)])
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ratios), (BOOTSTRAP_SAMPLES, len(ratios)), generator=generator)
    medians = ratios[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(0.025), medians.quantile(0.975)
    return Interval(float(ratios.quantile(0.5)), float(low), float(high))


def largest_error(task: Task, grads: dict[str, Tensor]) -> float:
    """The largest difference from a float64 loop over single samples.

    Per parameter: max |a - b| / max(max |b|, 1e-3 of the largest |b| over all parameters).
    """
    model = copy.deepcopy(task.model).double()
    params = dict(model.named_parameters())
    if grads.keys() != params.keys():
        raise AssertionError(f"no gradient for {sorted(params.keys() ^ grads.keys())}")
    if bad := [name for name in params if not grads[name].isfinite().all()]:
        raise AssertionError(f"gradients of {bad} are not finite")
    difference, size = dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0)
    for i in range(len(task.x)):
        sample_loss = loss(model(task.x[i : i + 1].double()), task.y[i : i + 1])
        sample_grads = torch.autograd.grad(sample_loss, list(params.values()))
        for name, b in zip(params, sample_grads, strict=True):
            if grads[name].shape != (len(task.x), *b.shape):
                raise AssertionError(f"{name}: shape {tuple(grads[name].shape)}")
            distance = float((grads[name][i] - b).abs().max())
            difference[name] = max(difference[name], distance)
            size[name] = max(size[name], float(b.abs().max()))
    floor = 1e-3 * max(size.values())
    return max(difference[name] / max(size[name], floor) for name in params)


def peak_bytes(task: Task, engine: Engine) -> int:
    """The most the allocator held at once during one warm step, above what it held before."""
    engine.clear()
    gc.collect()
    if task.x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        engine.step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _checked_engine(task: Task, peer: str) -> Engine:
    """The peer's engine, warm, after its gradients were found right."""
    engine = PEERS[peer](task)
    engine.step()
    error = largest_error(task, engine.grads())
    if not error <= TOLERANCE:
        raise AssertionError(f"wrong by {error:.1e}")
    warm_up(task, engine)
    return engine


def _timed(task: Task, step: Callable[[], None]) -> float:
    _synchronize(task)
    start = time.perf_counter()
    step()
    _synchronize(task)
    return time.perf_counter() - start


def _synchronize(task: Task) -> None:
    if task.x.is_cuda:
        torch.cuda.synchronize()


def _quartiles(seconds: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles([1e3 * s for s in seconds], n=4, method="inclusive")
    return low, middle, high


def _describe(reason: Exception) -> str:
    lines = str(reason).strip().splitlines() or [""]
    return f"{type(reason).__name__}: {lines[0]}"[:200]
