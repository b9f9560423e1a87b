"""One of two processes that train privately a model that FSDP2 shards: `python -m tests.private_sharded RANK FOLDER`.

Each case compares the two with private training in one process, of which `opacus` adds the noise, or with what the
noise has to be. tests/test_private_sharded.py reads what each process found.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
import fxgrad.opacus
from fxgrad.api import engine_of
from fxgrad.capture.sharded import units_of
from fxgrad.errors import FxgradError, OptionError, UnaccountedGrad
from tests.sharded_processes import WORLD, C, ids, loss, main, refused, tied, units

CASES: dict[str, Callable[[int], None]] = {}
Run = TypeVar("Run", bound=Callable[..., None])
SAMPLES, BATCH = 40, 10


def case(run: Run) -> Run:
    CASES[run.__name__] = run
    return run


def small() -> nn.Module:
    """Return a model of two units."""
    return tied(blocks=1)


def prepared(model: Any, engine: Any = None, size: int = BATCH, **options: Any) -> tuple[Any, Any, Any]:
    """Return model, optimizer and loader of make_private."""
    chosen: dict[str, Any] = dict(
        noise_multiplier=0.0, max_grad_norm=C, one_backward=True, check_first_batch=False, backend="eager"
    )
    if units_of(model) is None:
        chosen["independent"] = True  # a reference in each process
    return fxgrad.opacus.make_private(
        engine or PrivacyEngine(accountant="rdp"),
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(torch.arange(SAMPLES)), size),
        **(chosen | options),
    )


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: cast(Any, p).full_tensor() for name, p in model.named_parameters()}


def step(model: nn.Module, optimizer: Any, x: Tensor, mean: bool = False) -> None:
    optimizer.zero_grad()
    outputs = model(x)
    (loss(outputs) / max(1, len(x)) if mean else loss(outputs)).backward()
    optimizer.step()


def trains(rank: int, model: Any, sharded: Callable[[Any], Any], mean: bool = False, backend: str = "eager") -> None:
    """Take steps without noise beside one process with all samples."""
    alone = copy.deepcopy(model)
    reduction = "mean" if mean else "sum"
    engines = [PrivacyEngine(accountant="rdp") for _ in range(2)]
    private, optimizer, _ = prepared(sharded(model), engine=engines[0], loss_reduction=reduction, backend=backend)
    reference, other, _ = prepared(alone, engine=engines[1], loss_reduction=reduction)
    for seed, sizes in enumerate([(0, 7), (1, 7), (4, 3), (0, 0), (5, 0)]):
        batch = ids(sizes, seed)
        step(private, optimizer, batch[rank], mean)
        step(reference, other, torch.cat(batch), mean)
    found = whole(private)
    for name, parameter in reference.named_parameters():
        assert torch.allclose(found[name], parameter, rtol=0, atol=1e-10), (name, found[name] - parameter)
    assert engines[0].accountant.history == engines[1].accountant.history


# Equal to one process


@case
def without_noise(rank: int) -> None:
    trains(rank, tied(), units)
    trains(rank, small(), units, mean=True)


@case
def sharded_after_transforming(rank: int) -> None:
    def sharded(model: Any) -> Any:
        quantity = fxgrad.ClippedGrad(torch.tensor(C, dtype=torch.float64))
        return units(fxgrad.transform(model, quantity=quantity, loss_reduction="sum", backend="eager"))

    trains(rank, small(), sharded)


@case
def replicated_meshes(rank: int) -> None:
    for shape in ((1, WORLD), (WORLD, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        trains(rank, small(), partial(units, mesh=mesh), mean=True)


@case
def frozen_parameters(rank: int) -> None:
    model = small()
    model.blocks[0].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    trains(rank, model, units)


def by_graphs_that_gather(rank: int) -> None:
    """A case of the long run: graphs gather unit after unit, for replicas and for Poisson batches, too."""
    trains(rank, tied(), units, backend="aot_eager")
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    trains(rank, tied(), partial(units, mesh=mesh), mean=True, backend="aot_eager")
    poisson_batches(rank, backend="aot_eager")


# Sampling and accounting


@case
def poisson_batches(rank: int, backend: str = "eager") -> None:
    """All take the same number of steps, empty ones too, of different parts; each step counts once."""
    torch.manual_seed(0)  # in both, as training scripts do
    engines = [PrivacyEngine(accountant="rdp") for _ in range(2)]
    alone = small()
    options: dict[str, Any] = dict(noise_multiplier=1.0, size=2, backend=backend)
    private, optimizer, loader = prepared(units(copy.deepcopy(alone)), engine=engines[0], **options)
    reference, other, single = prepared(alone, engine=engines[1], noise_multiplier=1.0, size=2)
    assert optimizer.expected_batch_size == other.expected_batch_size == 2
    data, own = ids((SAMPLES, 0))[0], []
    for (drawn,) in loader:
        step(private, optimizer, data[drawn])
        own.append(drawn)
    for (drawn,) in single:
        step(reference, other, data[drawn])
    assert engines[0].accountant.history == engines[1].accountant.history == [(1.0, 2 / SAMPLES, SAMPLES // 2)]
    assert engines[0].get_epsilon(1e-3) == engines[1].get_epsilon(1e-3)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, [drawn.tolist() for drawn in own])
    assert [len(each) for each in every] == [SAMPLES // 2] * WORLD
    assert any(not drawn for each in every for drawn in each)
    parts = [{i for drawn in each for i in drawn} for each in every]
    assert not parts[0] & parts[1]
    assert [len(drawn) for drawn in every[0]] != [len(drawn) for drawn in every[1]]  # streams of their own


# The noise


def noises(model: Any, steps: int, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return each step's noise: of this process's elements, and of those of all processes."""
    private, optimizer, _ = prepared(model, noise_multiplier=2.0, **options)
    here = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss(private(ids((1, 1), seed)[dist.get_rank()])).backward()
        before = [p.grad.to_local() * WORLD for p in private.parameters()]
        optimizer.step()
        after = [p.grad.to_local() - g for p, g in zip(private.parameters(), before, strict=True)]
        here.append(torch.cat([g.flatten() for g in after]))
    parts: list[Any] = [None] * WORLD
    dist.all_gather_object(parts, here)
    return here, [torch.cat(each) for each in zip(*parts, strict=True)]


STEPS = 200


@case
def noise_of_shards(rank: int) -> None:
    """Right in each element, and independent over elements, steps and processes.

    With n = 200 steps, a standard deviation over them is right to 1 / sqrt(2 n) = 5 %, so each element is within 30 %
    (six of that); over all of the 600 elements it is right to 0.2 %, and has to be to 1 %. Correlations over n numbers
    are 1 / sqrt(n) = 0.07 at random; each of 180,000 pairs is below 6.5 of that.
    """
    torch.manual_seed(0)
    _, all_steps = noises(units(tied(width=11, blocks=1)), STEPS, loss_reduction="sum")
    noise = torch.stack(all_steps) / (2.0 * C)  # [steps, elements]
    assert (noise.square().mean(0).sqrt() - 1).abs().max() < 0.3
    assert abs(float(noise.square().mean().sqrt()) - 1) < 0.01
    assert abs(float(noise.mean())) < 5 / noise.numel() ** 0.5
    correlations = noise.T @ noise / STEPS
    correlations.fill_diagonal_(0)
    assert correlations.abs().max() < 6.5 / STEPS**0.5
    over_steps = noise @ noise.T / noise.shape[1]
    over_steps.fill_diagonal_(0)
    assert over_steps.abs().max() < 6 / noise.shape[1] ** 0.5


@case
def streams_of_processes(rank: int) -> None:
    """Neither torch.manual_seed nor equal generators of the user make the processes' noise alike."""
    for generator in (None, torch.Generator().manual_seed(5)):
        torch.manual_seed(0)
        (here, *_), _ = noises(units(tied()), 1, noise_generator=generator)
        others: list[Any] = [None] * WORLD
        dist.all_gather_object(others, here)
        size = min(map(len, others))
        one, other = (each[:size] / (2.0 * C) for each in others)
        assert abs(float((one * other).mean())) < 6 / size**0.5


@case
def replicas_are_equal(rank: int) -> None:
    """Also where the user's generators differ."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    for generator in (None, torch.Generator().manual_seed(rank)):
        here, _ = noises(units(small(), mesh=mesh), 3, noise_generator=generator)
        replicas: list[Any] = [None] * WORLD
        dist.all_gather_object(replicas, here)
        assert all(torch.equal(one, other) for one, other in zip(*replicas, strict=True))
        assert abs(float((here[0] * here[1]).mean())) / (2.0 * C) ** 2 < 6 / len(here[0]) ** 0.5


@case
def seeds_are_secret(rank: int) -> None:
    """A new seed each time, and none for a checkpoint; the user's generator repeats the noise."""
    torch.manual_seed(0)
    first, again = (noises(units(small()), 1)[1][0] for _ in range(2))
    assert not torch.equal(first, again)
    seeded = [noises(units(small()), 1, noise_generator=torch.Generator().manual_seed(7))[1][0] for _ in range(2)]
    assert torch.equal(*seeded)
    _, optimizer, _ = prepared(units(small()))
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    assert "seed" not in repr(optimizer)


# Refused


@case
def what_is_not_supported(rank: int) -> None:
    cases: dict[str, dict[str, Any]] = {
        "one_backward=False": {"one_backward": False},
        "clipping='per_layer'": {"clipping": "per_layer", "max_grad_norm": [C] * len([*small().parameters()])},
        "clipping='automatic'": {"clipping": "automatic"},
        "poisson_sampling=False": {"poisson_sampling": False},
        "independent=True": {"independent": True},
        "fix=True": {"fix": True},
        "check_first_batch=True": {"check_first_batch": True},
    }
    for what, options in cases.items():
        model = units(small())
        before = {name: id(part) for name, part in model.named_modules()}, model.state_dict().keys()
        refused(OptionError, what, partial(prepared, model, **options))
        assert before == ({name: id(part) for name, part in model.named_modules()}, model.state_dict().keys())
        assert engine_of(model) is None
    mesh = init_device_mesh("cpu", (WORLD,))
    blocks: Any = small()
    for block in blocks.blocks:
        fully_shard(block, mesh=mesh)
    refused(OptionError, "in no unit", partial(prepared, blocks))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    refused(OptionError, "MixedPrecisionPolicy", partial(prepared, units(small(), mp_policy=policy)))
    several: Any = small()
    fully_shard(several.blocks[0], mesh=init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("a", "b")))
    refused(OptionError, "different meshes", partial(prepared, fully_shard(several, mesh=mesh)))
    part = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("a", "b"))["b"]
    refused(OptionError, "of 2 processes", partial(prepared, units(small(), mesh=part)))


@case
def settings_of_fsdp2(rank: int) -> None:
    """Set before or after make_private, or between forward and backward."""
    x = ids((2, 3))[rank]
    for name, value, what in (
        ("set_gradient_divide_factor", 1.0, "set_gradient_divide_factor"),
        ("set_requires_gradient_sync", False, "set_requires_gradient_sync(False)"),
        ("set_requires_all_reduce", False, "set_requires_all_reduce(False)"),
        ("set_is_last_backward", False, "set_is_last_backward(False)"),
        ("set_all_reduce_hook", lambda grad: None, "set_all_reduce_hook"),
    ):
        model = units(small())
        getattr(model, name)(value)
        refused(OptionError, what, partial(prepared, model))
        private, optimizer, _ = prepared(units(small()))
        getattr(private, name)(value)
        refused(OptionError, what, partial(private, x))
        private, optimizer, _ = prepared(units(small()))
        outputs = private(x)
        getattr(private, name)(value)
        loss(outputs).backward()
        refused(UnaccountedGrad, what, optimizer.step)


@case
def gradients_changed_before_the_step(rank: int) -> None:
    x = ids((2, 3))[rank]
    grad_of = lambda model: model.head.weight.grad  # noqa: E731
    private, optimizer, _ = prepared(units(small()))
    for change in (
        lambda model: grad_of(model).mul_(2),
        lambda model: grad_of(model).to_local().mul_(2),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: setattr(model.head.weight, "grad", grad_of(model) * 2),
        lambda model: torch._foreach_mul_([grad_of(model)], 2.0),
        lambda model: setattr(model.head.weight, "grad", None),
    ):
        optimizer.zero_grad()
        loss(private(x)).backward()
        with torch.no_grad():
            change(private)
        refused(UnaccountedGrad, "grad of", optimizer.step)
        step(private, optimizer, x)  # and goes on


@case
def two_backwards_in_a_step(rank: int) -> None:
    x = ids((2, 3))[rank]
    private, optimizer, _ = prepared(units(small()))
    for _ in range(2):
        loss(private(x)).backward()
    refused(FxgradError, "2 backwards", optimizer.step)
    optimizer.zero_grad()
    step(private, optimizer, x)
    refused(UnaccountedGrad, "no backward", optimizer.step)


@case
def hooks_on_shards(rank: int) -> None:
    private, optimizer, _ = prepared(units(small()))
    shard = next(private.parameters())
    shard.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    refused(UnaccountedGrad, "hook", lambda: loss(private(ids((2, 3))[rank])).backward())
    refused(UnaccountedGrad, "no backward", optimizer.step)


@case
def an_optimizer_hook_and_the_original_step(rank: int) -> None:
    x = ids((2, 3))[rank]
    private, optimizer, _ = prepared(units(small()))
    loss(private(x)).backward()
    refused(UnaccountedGrad, "steps by itself", optimizer.original_optimizer.step)
    changes: list[Callable[[Any], Any]] = [
        lambda grad: grad.to_local().zero_(),
        lambda grad: torch._foreach_mul_([grad], 2.0),
    ]
    for change in changes:
        private, optimizer, _ = prepared(units(small()))

        def hook(*_: Any, change: Any = change, model: Any = private) -> None:
            change(model.blocks[0].up.weight.grad)

        optimizer.original_optimizer.register_step_pre_hook(hook)
        loss(private(x)).backward()
        with torch.no_grad():
            refused(UnaccountedGrad, "between the noise and the step", optimizer.step)


@case
def memory_manager(rank: int) -> None:
    _, optimizer, loader = prepared(units(small()))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
        refused(OptionError, "BatchMemoryManager", lambda: list(parts))


@case
def the_engine_of_opacus_scripts(rank: int) -> None:
    model = units(small())
    private, optimizer, criterion, _ = fxgrad.opacus.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH),
        noise_multiplier=1.0,
        max_grad_norm=C,
        grad_sample_mode="ghost",
        check_first_batch=False,
        backend="eager",
    )
    x = ids((2, 3))[rank]
    criterion(private(x)[:, 0], x[:, 0]).backward()
    optimizer.step()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), Path(sys.argv[2]), CASES)
