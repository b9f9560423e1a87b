"""What a clipping step costs on a sharded model: ``python -m benchmarks.sharded [--models TF-4 100M] [--rounds N]``.

Two gloo processes of one thread each shard a model by FSDP2, a unit for each block. Steps of these ways take turns:
plain FSDP2, plain FSDP2 with each block compiled, fxgrad's `ClippedGrad` through Inductor, and Opacus's ghost clipping
in its own units (`FSDP2Wrapper`), which needs two backwards. A step is forward, loss and backward. Every way's p.grad
is compared with the loop over single samples. The figures are those of process 0: seconds, the ratio to the faster
plain step, pair by pair, the peak of allocated memory, and the collectives of a step.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import fxgrad
from benchmarks.models import MODELS
from benchmarks.models.transformers import CLASSES, Transformer
from benchmarks.tasks import Spec, class_losses, vectors

WORLD, C = 2, 1.0
PLAIN, COMPILED, FXGRAD, OPACUS = "FSDP2", "FSDP2, blocks compiled", "fxgrad", "Opacus, ghost_fsdp"
SPECS = {
    "TF-4": MODELS["TF-4"],
    "100M": Spec(
        lambda: Transformer(layers=8, width=1024, heads=16), 8, vectors(256, 1024, classes=CLASSES), class_losses
    ),
}
CALLS = {"c10d::_allgather_base_": "all-gathers", "c10d::_reduce_scatter_base_": "reduce-scatters"}


@dataclass
class Way:
    """One way to a step, and the model whose p.grad it fills."""

    model: nn.Module
    step: Callable[[], None]


def units(model: Any) -> Any:
    """Shard a transformer, a unit for each block."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def plain(model: Any, x: Tensor, y: Tensor, compiled: bool) -> Way:
    if compiled:
        for block in model.blocks:
            block.compile()
    return Way(units(model), lambda: class_losses(model(x), y).sum().backward())


def private(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    transformed = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C))
    return Way(transformed, lambda: class_losses(transformed(x), y).sum().backward())


def opacus(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    """Both backwards, as `DPTensorFastGradientClipping.backward` runs them."""
    from opacus.grad_sample import GradSampleModuleFastGradientClippingFSDP
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    sharded = FSDP2Wrapper(model)
    wrapped: Any = GradSampleModuleFastGradientClippingFSDP(sharded, loss_reduction="sum", max_grad_norm=C)

    def step() -> None:
        losses = class_losses(wrapped(x), y)
        losses.sum().backward(retain_graph=True)
        wrapped.zero_grad(set_to_none=True)
        factors = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factors * losses).sum().backward()
        wrapped.enable_hooks()

    return Way(sharded, step)


WAYS: dict[str, Callable[..., Way]] = {
    PLAIN: partial(plain, compiled=False),
    COMPILED: partial(plain, compiled=True),
    FXGRAD: private,
    OPACUS: opacus,
}


def clear(way: Way) -> None:
    for p in way.model.parameters():
        p.grad = None


def expected(model: nn.Module, x: Tensor, y: Tensor, clipping: bool) -> dict[str, Tensor]:
    """Return p.grad of one process with the samples of all, divided as FSDP2 divides."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        class_losses(model(x[i : i + 1]), y[i : i + 1]).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        for name, g in grads.items():
            total[name] += g * ((C / (norm + 1e-6)).clamp(max=1) if clipping else 1)
    model.zero_grad()
    return {name: g / WORLD for name, g in total.items()}


def error(way: Way, wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of p.grad, beside the largest number of each parameter's."""
    errors = []
    for p, g in zip(way.model.parameters(), wanted.values(), strict=True):
        assert isinstance(p.grad, DTensor)
        errors.append(float((p.grad.full_tensor() - g).abs().max() / g.abs().max()))
    return max(errors)


def peak_and_calls(way: Way) -> tuple[float, str]:
    """Return the megabytes that a step had at most beside what lived before it, and its collectives."""
    clear(way)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        way.step()
    counts = Counter(CALLS[event.name] for event in seen.events() if event.name in CALLS)
    records = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(records, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 1e6, ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def row(cells: Sequence[object]) -> None:
    if dist.get_rank() == 0:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def measure(name: str, names: Sequence[str], rounds: int) -> None:
    """Print one model's rows."""
    spec, rank = SPECS[name], dist.get_rank()
    torch.manual_seed(0)
    model, (x, y) = spec.build(), spec.data(WORLD * spec.batch)
    mine = x.chunk(WORLD)[rank], y.chunk(WORLD)[rank]
    ways = {one: WAYS[one](copy.deepcopy(model), *mine) for one in names}
    for way in ways.values():
        for _ in range(3):
            clear(way)
            way.step()
    seconds: dict[str, list[float]] = {one: [] for one in names}
    for _ in range(rounds):
        for one, way in ways.items():
            clear(way)
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            way.step()
            dist.barrier()
            seconds[one].append(time.perf_counter() - start)
    faster = min((PLAIN, COMPILED), key=lambda one: statistics.median(seconds[one]))
    wanted = {clipping: expected(model, x, y, clipping) for clipping in (False, True)}
    for one, way in ways.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[one], seconds[faster], strict=True))
        wrong = error(way, wanted[one in (FXGRAD, OPACUS)])
        assert wrong < 1e-3, (name, one, wrong)
        peak, calls = peak_and_calls(way)
        row((name, one, f"{statistics.median(seconds[one]):.3f}", f"{ratio:.2f}", f"{peak:.0f}", calls, f"{wrong:.0e}"))


def work(arguments: argparse.Namespace) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row(("model", "step", "seconds", "ratio", "peak, MB", "collectives", "largest error"))
    row(["---"] * 7)
    for name in arguments.models:
        measure(name, arguments.ways, arguments.rounds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SPECS, default=list(SPECS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="with both plain ones")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
        return
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, "-m", "benchmarks.sharded", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
