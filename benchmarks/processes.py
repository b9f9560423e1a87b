"""Each model and peer in a process of its own, so that no compiler state or memory is shared."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from benchmarks.measure import Comparison, describe, first_step
from benchmarks.models import MODELS
from benchmarks.results import FXGRAD, PLAIN, CompileRecord, Record
from benchmarks.roofline import Rates, measure_rates
from benchmarks.tasks import Quantity, Task, make_task

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What every process is told."""

    device: str
    backend: str
    rounds: int
    seed: int
    quantities: tuple[Quantity, ...]
    rates: Rates | None = None
    batch: int | None = None  # in place of each model's own


def compare_all(options: Options, models: Sequence[str], peers: Sequence[str]) -> Iterator[Record]:
    """The records of one model and peer after another."""
    pairs = [(model, peer) for model in models for peer in peers]
    for model, peer in tqdm(pairs, desc="model and peer"):
        yield from compare_alone(options, model, peer)


def compare_alone(options: Options, model: str, peer: str) -> Iterator[Record]:
    """One process for all quantities; when it dies that is a failure of the peer, and the next ones get another."""
    left = list(options.quantities)
    while left:
        with fresh_process() as pool:
            try:
                while left:
                    yield pool.submit(run_compare, options, model, peer, left[0]).result()
                    left.pop(0)
            except BrokenProcessPool:
                yield Record(model, peer, left.pop(0), failed="the process died (out of memory?)")


def rates_alone(options: Options) -> Rates:
    """The machine's rates, measured in a process of their own."""
    return in_fresh_process(run_rates, options)


def compile_all(options: Options, models: Sequence[str], repetitions: int) -> Iterator[CompileRecord]:
    """First steps of plain and fxgrad, alternating, without caches."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    peers = [(PLAIN, options.quantities[0]), *((FXGRAD, quantity) for quantity in options.quantities)]
    runs = [(model, *peer) for model in models for _ in range(repetitions) for peer in peers]
    for run in tqdm(runs, desc="compile time", disable=not runs):
        # Compiled C++ is found again by its hash even so: hence a folder of its own.
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            record = in_fresh_process(run_first_step, options, *run)
        if record is not None:
            yield record


def in_fresh_process(run: Callable[..., T], options: Options, *what: Any) -> T:
    with fresh_process() as pool:
        return pool.submit(run, options, *what).result()


def fresh_process() -> ProcessPoolExecutor:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no line for every profile
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))


def run_compare(options: Options, model: str, peer: str, quantity: Quantity) -> Record:
    return comparison(options, model, peer).compare(quantity)


@lru_cache(maxsize=1)
def comparison(options: Options, model: str, peer: str) -> Comparison:
    """This process's one comparison, kept from one quantity to the next."""
    return Comparison(prepare(options, model), peer, options.rounds, options.seed, options.rates)


def run_rates(options: Options) -> Rates:
    use_full_precision()
    return measure_rates(options.device)


def run_first_step(options: Options, model: str, peer: str, quantity: Quantity) -> CompileRecord | None:
    try:
        return first_step(prepare(options, model), peer, quantity)
    except Exception as reason:
        tqdm.write(f"{model} {peer} {quantity}: {describe(reason)}")
        return None


def prepare(options: Options, model: str) -> Task:
    """The named model's task, as asked for."""
    use_full_precision()
    spec = MODELS[model] if options.batch is None else replace(MODELS[model], batch=options.batch)
    return make_task(model, spec, options.device, options.backend, options.seed)


def use_full_precision() -> None:
    """The results are checked to 1e-4, which TF32 does not reach."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
