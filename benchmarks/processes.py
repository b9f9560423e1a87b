"""Each measurement in a process of its own, so that no compiler state or memory is shared."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

import torch
from tqdm import tqdm

from benchmarks.measure import FXGRAD, PLAIN, CompileRecord, Record, compare, first_step
from benchmarks.models import make_task
from benchmarks.report import Compiles

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What every process is told."""

    device: str
    backend: str
    rounds: int
    seed: int


def compare_all(options: Options, models: list[str], peers: list[str]) -> list[Record]:
    """A record for each model and peer."""
    pairs = [(model, peer) for model in models for peer in peers]
    return [compare_alone(options, *pair) for pair in tqdm(pairs, desc="model and peer")]


def compare_alone(options: Options, model: str, peer: str) -> Record:
    """One record; a process that dies is a failure of the peer."""
    try:
        return in_fresh_process(run_compare, options, model, peer)
    except BrokenProcessPool:
        return Record(model, peer, failed="the process died (out of memory?)")


def compile_all(options: Options, models: list[str], repetitions: int) -> Compiles:
    """First steps of plain and fxgrad, alternating, without caches."""
    compiles: Compiles = {model: {PLAIN: [], FXGRAD: []} for model in models}
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    runs = [
        (model, peer) for model in models for _ in range(repetitions) for peer in compiles[model]
    ]
    for model, peer in tqdm(runs, desc="compile time", disable=not runs):
        # Compiled C++ is found again by its hash even so: hence a folder of its own.
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            record = in_fresh_process(run_first_step, options, model, peer)
        if record is not None:
            compiles[model][peer].append(record)
    return compiles


def in_fresh_process(run: Callable[[Options, str, str], T], options: Options, *what: str) -> T:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no line for every profile
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, options, *what).result()


def run_compare(options: Options, model: str, peer: str) -> Record:
    use_full_precision()
    task = make_task(model, options.device, options.backend, options.seed)
    return compare(task, peer, options.rounds, options.seed)


def run_first_step(options: Options, model: str, peer: str) -> CompileRecord | None:
    use_full_precision()
    try:
        return first_step(make_task(model, options.device, options.backend), peer)
    except Exception as reason:
        tqdm.write(f"{model} {peer}: {type(reason).__name__}: {reason}")
        return None


def use_full_precision() -> None:
    """The results are checked to 1e-4, which TF32 does not reach."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
