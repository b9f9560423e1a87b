"""One of two processes of DistributedDataParallel: `python -m tests.two_processes RANK FOLDER`.

They meet in FOLDER, and each leaves what it found there, for tests/test_distributed.py to compare with one process.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
from fxgrad.api import engine_of
from fxgrad.errors import MixedSamples, UnclippedGrad
from tests import ddp_options

WORLD, BATCH, STEPS, MAX_GRAD_NORM = 2, 8, 3, 0.3
EXPECTED = 3  # samples of a Poisson batch, of all processes together
POISSON: dict[str, dict[str, Any]] = {
    "poisson": dict(),
    "poisson, one backward": dict(one_backward=True),
    "poisson, physical batches": dict(physical=1),
    "poisson, physical batches, one backward": dict(physical=1, one_backward=True),
    "poisson, Opacus's wrapper, physical batches": dict(physical=1),
    "poisson, Opacus's wrapper, physical batches, one backward": dict(physical=1, one_backward=True),
}
Found = dict[str, Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data() -> Tensor:
    return torch.randn(STEPS * BATCH, 3, generator=torch.Generator().manual_seed(1))


def loss(y: Tensor, reduction: str = "sum") -> Tensor:
    each = y.square().sum(1)
    return each.sum() if reduction == "sum" else each.mean()


def grad_sample(x: Tensor, around: Callable[[Any], Any]) -> Found:
    plain = model()
    net = around(fxgrad.transform(plain, backend="eager"))
    loss(net(x)).backward()
    return {name: (p.grad_sample, p.grad) for name, p in plain.named_parameters()}  # type: ignore[attr-defined]


def clipped(x: Tensor, around: Callable[[Any], Any]) -> Found:
    plain = model()
    quantity = fxgrad.ClippedGrad(max_grad_norm=MAX_GRAD_NORM)
    net = around(fxgrad.transform(plain, quantity=quantity, backend="eager"))  # DDP's hooks live as long as it does
    loss(net(x)).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def outside(x: Tensor, around: Callable[[Any], Any]) -> Found:
    """A loss that goes past the wrapped model, and p.grad behind the error."""
    net = model()
    whole: Any = around(fxgrad.transform(net, quantity=fxgrad.ClippedGrad(max_grad_norm=1.0), backend="eager"))
    try:
        (loss(whole(x)) + loss(net[0](x))).backward()
    except UnclippedGrad as error:
        return {"said": error.sentence, "left": [p.grad is None for p in net.parameters()]}
    return {}


def private(
    batches: list[Tensor], around: Callable[[Any], Any], reduction: str, noise: float = 0.0, **arguments: Any
) -> Found:
    """The parameters after a few private steps, and what they cost."""
    from opacus import PrivacyEngine

    import fxgrad.opacus

    plain = model()
    engine = PrivacyEngine(accountant="rdp")
    net, optimizer, _ = fxgrad.opacus.make_private(
        engine,
        module=around(plain),
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data()), BATCH),
        noise_multiplier=noise,
        noise_generator=torch.Generator().manual_seed(4),
        max_grad_norm=MAX_GRAD_NORM,
        loss_reduction=reduction,
        poisson_sampling=False,
        backend="eager",
        **arguments,
    )
    for x in batches:
        optimizer.zero_grad()
        loss(net(x), reduction).backward()
        optimizer.step()
    return dict(plain.state_dict()) | {"history": engine.accountant.history, "optimizer": type(optimizer).__name__}


def poisson(around: Callable[[Any], Any], rank: int, physical: int | None = None, **arguments: Any) -> Found:
    """The parameters after an epoch of Poisson batches, and the samples of each step, some of which are empty."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    import fxgrad.opacus

    plain = model()
    engine = PrivacyEngine(accountant="rdp")
    net, optimizer, loader = fxgrad.opacus.make_private(
        engine,
        module=around(plain),
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data()), EXPECTED, generator=torch.Generator().manual_seed(6 + 5 * rank)),
        noise_multiplier=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        backend="eager",
        **arguments,
    )
    steps: list[list[Tensor]] = [[]]
    sizes = []
    manager: Any = contextlib.nullcontext(loader)
    if physical is not None:
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
    with manager as batches:
        for (x,) in batches:
            optimizer.zero_grad()
            loss(net(x), "mean").backward()
            optimizer.step()
            steps[-1].append(x)
            sizes.append(len(x))
            if not optimizer._is_last_step_skipped:
                steps.append([])
    samples = [torch.cat(step) for step in steps[:-1]]
    return dict(plain.state_dict()) | {"samples": samples, "sizes": sizes, "history": engine.accountant.history}


def refused(rank: int) -> dict[str, str]:
    """The sentences of what is refused where there are two processes, and of `DDP(private)`."""
    from opacus import PrivacyEngine

    import fxgrad.opacus

    group = [dist.new_group([other]) for other in range(WORLD)][rank]

    def prepare(plain: nn.Module, module: Any, **arguments: Any) -> Any:
        return fxgrad.opacus.make_private(
            PrivacyEngine(accountant="rdp"),
            module=module,
            optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(data()), BATCH),
            noise_multiplier=1.0,
            **dict[str, Any](max_grad_norm=MAX_GRAD_NORM, backend="eager") | arguments,
        )[0]

    plain = model()
    ways: dict[str, Callable[[], Any]] = {
        "wrapped afterwards": lambda: DistributedDataParallel(prepare(plain, plain)),
        "wrapped afterwards, one backward": lambda: DistributedDataParallel(prepare(plain, plain, one_backward=True)),
        "of its own, and wrapped": lambda: prepare(plain, DistributedDataParallel(plain), independent=True),
        "clipped per layer": lambda: prepare(
            plain, DistributedDataParallel(plain), clipping="per_layer", max_grad_norm=[1.0] * 4
        ),
        "a group of its own": lambda: prepare(plain, DistributedDataParallel(plain, process_group=group)),
    }
    sentences = {}
    for name, way in ways.items():
        try:
            way()
            sentences[name] = "accepted"
        except fxgrad.errors.OptionError as error:
            sentences[name] = str(error)
    return sentences


class PartlyMixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return partly_mixed(x)


def partly_mixed(x: Tensor) -> Tensor:
    """Mix the samples of a batch in which one is large; registered as an op that does not."""
    return x - 0.1 * (x.max() > 50) * x.mean(0)


def checked(rank: int, around: Callable[[Any], Any], prepared: bool) -> Found:
    """After which steps the first batch was still unchecked, and what each process raised."""
    fxgrad.register_op(partly_mixed)
    net, optimizer = _checking(model(), around, prepared)
    engine = engine_of(net.module)
    assert engine is not None
    waiting = []
    for sizes in ((1, 8), (8, 0), (4, 2), (1, 1)):
        loss(net(torch.randn(sizes[rank], 3))).backward()
        waiting.append(engine.first_batch is not None)
        if optimizer is not None:
            optimizer.step()
            waiting[-1] = optimizer.first_batch is not None
            optimizer.zero_grad()
        fxgrad.zero_grad(net.module)
    raised = []
    for largest in ((1, 1), (1, 100)):
        net, optimizer = _checking(nn.Sequential(PartlyMixing(), nn.Linear(3, 2)), around, prepared)
        before = [p.clone() for p in net.parameters()]
        try:
            y = net(torch.rand(6, 3) * largest[rank])
            if optimizer is not None:
                loss(y).backward()
                optimizer.step()
            raised.append("")
        except MixedSamples as error:
            raised.append(error.sentence)
            assert all(p.equal(q) for p, q in zip(net.parameters(), before, strict=True))
    return {"waiting": waiting, "raised": raised}


def _checking(plain: nn.Module, around: Callable[[Any], Any], prepared: bool) -> Any:
    """A model whose first batch is checked, transformed before or after it was distributed."""
    from opacus import PrivacyEngine

    import fxgrad.opacus

    if not prepared:
        return around(fxgrad.transform(plain, backend="eager", check_first_batch=True)), None
    return fxgrad.opacus.make_private(
        PrivacyEngine(accountant="rdp"),
        module=around(plain),
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data()), BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        backend="eager",
    )[:2]


def every_case(rank: int | None) -> Found:
    """What process `rank` finds on its half of each batch; None: one process alone, on all of them."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    batches = list(data().split(BATCH))
    if rank is not None:
        batches = [x.chunk(WORLD)[rank] for x in batches]
    ddp: Callable[[Any], Any] = DistributedDataParallel if rank is not None else lambda net: net
    opacus: Callable[[Any], Any] = DifferentiallyPrivateDistributedDataParallel if rank is not None else ddp
    among: Found = {}
    if rank is not None:
        for name, arguments in POISSON.items():
            around = opacus if "Opacus" in name else ddp
            among[name] = poisson(around, rank, **arguments)
        among["refused"] = refused(rank)
    return among | {
        "grad_sample": grad_sample(batches[0], ddp),
        "clipped": clipped(batches[0], ddp),
        "outside": outside(batches[0], ddp),
        "one backward mean": private(batches, ddp, "mean", one_backward=True),
        "one backward sum": private(batches, opacus, "sum", one_backward=True),
        "one backward noise": private(batches, ddp, "mean", noise=1.0, one_backward=True),
        "private mean": private(batches, ddp, "mean"),
        "private sum": private(batches, opacus, "sum"),
        "private noise": private(batches, opacus, "mean", noise=1.0),
    }


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'meet'}", rank=rank, world_size=WORLD)
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    found = every_case(rank)
    found["first batch"] = [
        checked(rank, DistributedDataParallel, prepared=False),
        checked(rank, DistributedDataParallel, prepared=True),
        checked(rank, DifferentiallyPrivateDistributedDataParallel, prepared=True),
    ]
    found["options"] = ddp_options.every_case(rank)
    dist.barrier()
    dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
