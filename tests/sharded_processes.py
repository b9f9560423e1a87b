"""One of two processes with models that FSDP2 shards: `python -m tests.sharded_processes RANK FOLDER`.

They meet in FOLDER. Each case compares what FSDP2 leaves with the loop over single samples of both processes, and
each process leaves what it found for tests/test_sharded.py: for each case "" or the traceback.
"""

from __future__ import annotations

import copy
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
from fxgrad.errors import AlreadySet, FxgradError, OptionError, UnclippedGrad
from fxgrad.testing import per_sample_grads

WORLD, C = 2, 0.5
CASES: dict[str, Callable[[int], None]] = {}
Run = TypeVar("Run", bound=Callable[..., None])


def case(run: Run) -> Run:
    CASES[run.__name__] = run
    return run


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Token ids to logits; the head is the table. Seven is odd, so shards are uneven."""

    def __init__(self, width: int = 5, words: int = 7, blocks: int = 3, recompute: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def loss(outputs: Tensor) -> Tensor:
    return outputs.float().square().sum() if outputs.dtype is torch.bfloat16 else outputs.square().sum()


def tied(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return Tied(**options).double()


def ids(sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Return each process's token ids, the same on both."""
    return list(torch.randint(7, (sum(sizes), 4), generator=torch.Generator().manual_seed(seed)).split(list(sizes)))


def units(model: Any, blocks: Sequence[nn.Module] | None = None, **options: Any) -> Any:
    """Shard each block, and the whole around them."""
    if "mesh" not in options:
        options["mesh"] = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks if blocks is None else blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def clipped_sum(model: nn.Module, x: Tensor) -> Any:
    """Return the clipped sum by the loop over single samples, averaged over the processes as FSDP2 averages."""
    rows = per_sample_grads(model, loss, (x,))
    each = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
    factors = (C / (each + 1e-6)).clamp(max=1)  # as ClippedGrad and Opacus
    return {name: torch.einsum("n,n...->...", factors, g) / WORLD for name, g in rows.items()}


def assert_grads(model: nn.Module, expected: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    """Compare p.grad, a DTensor with the placements of its parameter, whole."""
    for name, parameter in model.named_parameters():
        if name not in expected:
            assert parameter.grad is None, name
            continue
        grad: Any = parameter.grad
        assert grad is not None, name
        assert grad.placements == parameter.placements, name  # type: ignore[attr-defined]
        error = (grad.full_tensor() - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-30)
        assert error <= tolerance, (name, float(error))


def refused(error: type[Exception], part: str, run: Callable[[], Any]) -> None:
    try:
        run()
    except error as raised:
        assert part in str(raised), str(raised)
        return
    raise AssertionError(f"accepted: {part}")


# Equal to the loop


def _trains(rank: int, model: Any, sharded: Any, batches: Sequence[Sequence[Tensor]], tolerance: float = 1e-10) -> None:
    """Take private steps of AdamW beside a model on one process, with the gradients of the loop."""
    alone = copy.deepcopy(model)
    private = sharded(model)
    optimizer = torch.optim.AdamW(private.parameters(), lr=0.01)
    other = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss(private(batch[rank])).backward()
        expected = clipped_sum(alone, torch.cat(list(batch)))
        assert_grads(private, expected, tolerance)
        for name, parameter in alone.named_parameters():
            parameter.grad = expected[name]
        optimizer.step()
        other.step()
    whole = {name: p.full_tensor() for name, p in private.named_parameters()}
    for name, parameter in alone.named_parameters():
        assert torch.allclose(whole[name], parameter, rtol=0, atol=10 * tolerance), name


SIZES = [(4, 4), (3, 5), (1, 7), (0, 7), (2, 1), (1, 0), (0, 0), (5, 5)]


@case
def transformed_after_sharding(rank: int) -> None:
    def sharded(model: Any) -> Any:
        return fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")

    _trains(rank, tied(), sharded, [ids(sizes, i) for i, sizes in enumerate(SIZES)])


@case
def sharded_after_transforming(rank: int, sizes_of_batches: Sequence[tuple[int, int]] = SIZES[1:4]) -> None:
    """With three of the sizes; the long run has all of them, see tests/sharded_long.py."""

    def sharded(model: Any) -> Any:
        return units(fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="aot_eager"))

    _trains(rank, tied(), sharded, [ids(sizes, i) for i, sizes in enumerate(sizes_of_batches)])


@case
def kept_after_forward(rank: int) -> None:
    def sharded(model: Any) -> Any:
        model = units(model, reshard_after_forward=False)
        return fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")

    _trains(rank, tied(), sharded, [ids(sizes) for sizes in SIZES[:3]])


@case
def recomputed_in_backward(rank: int) -> None:
    def sharded(model: Any) -> Any:
        return fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="aot_eager")

    _trains(rank, tied(blocks=1, recompute=True), sharded, [ids(sizes) for sizes in SIZES[1:4]])


@case
def replicated_and_sharded_meshes(rank: int) -> None:
    for shape in ((1, WORLD), (WORLD, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

        def sharded(model: Any, mesh: Any = mesh) -> Any:
            return fxgrad.transform(units(model, mesh=mesh), quantity=fxgrad.ClippedGrad(C), backend="eager")

        _trains(rank, tied(), sharded, [ids(sizes) for sizes in SIZES[2:4]])


@case
def blocks_without_a_root(rank: int) -> None:
    def sharded(model: Any) -> Any:
        for part in (model.conv, model.norm, model.head):
            fully_shard(part, mesh=init_device_mesh("cpu", (WORLD,)))
        return fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")

    torch.manual_seed(0)
    batches = [list(torch.randn(6, 1, 5, 5, dtype=torch.float64).split([2, 4])) for _ in range(2)]
    _trains(rank, Pictures().double(), sharded, batches)


@case
def several_modules_in_a_unit(rank: int) -> None:
    def sharded(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard([model.conv, model.norm], mesh=mesh)
        return fxgrad.transform(fully_shard(model, mesh=mesh), quantity=fxgrad.ClippedGrad(C), backend="eager")

    torch.manual_seed(0)
    batches = [list(torch.randn(7, 1, 5, 5, dtype=torch.float64).split([0, 7])) for _ in range(2)]
    _trains(rank, Pictures().double(), sharded, batches)


@case
def a_recurrent_unit(rank: int) -> None:
    def sharded(model: Any) -> Any:
        model = units(model, [model.rnn, model.head])
        return fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="aot_eager")

    torch.manual_seed(0)
    batches = [list(torch.randn(5, 3, 3, dtype=torch.float64).split(sizes)) for sizes in ([2, 3], [1, 4])]
    _trains(rank, Sequences().double(), sharded, batches)


@case
def bfloat16_by_policy(rank: int) -> None:
    """The policy's dtypes are those of the call, and p.grad is the parameters' own."""
    model: Any = tied().float()
    alone = copy.deepcopy(model).double()
    policies = [MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=d) for d in (None, torch.float32)]
    for part, policy in (*((block, policies[0]) for block in model.blocks), (model, policies[1])):
        fully_shard(part, mesh=init_device_mesh("cpu", (WORLD,)), mp_policy=policy)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = ids((3, 5))
    outputs = private(batch[rank])
    assert outputs.dtype is torch.float32
    loss(outputs).backward()
    assert_grads(private, clipped_sum(alone, torch.cat(batch)), tolerance=0.05)
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in private.parameters())


@case
def casts_between_units(rank: int) -> None:
    """A unit casts what it is given and what it returns, also inside of the model."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * 1.01)  # in float32

    mesh, policy = init_device_mesh("cpu", (WORLD,)), MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    torch.manual_seed(0)
    model: Any = Between()
    alone = copy.deepcopy(model).double()
    plain: Any = copy.deepcopy(model)
    plain = units(plain, [plain.first, plain.second], mesh=mesh, mp_policy=policy)
    model = units(model, [model.first, model.second], mesh=mesh, mp_policy=policy)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = list(torch.randn(6, 3).split([2, 4]))
    assert torch.equal(private(batch[rank]), plain(batch[rank]))
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sum(alone, torch.cat(batch).double()), tolerance=0.05)


# What a training loop does


@case
def frozen_between_steps(rank: int) -> None:
    model = tied()
    alone = copy.deepcopy(model)
    private = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    for frozen in ((), ("blocks.1.up.weight", "blocks.2.norm.bias"), ("table.weight",), ()):
        for one in (private, alone):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name not in frozen)
        private.zero_grad()
        batch = ids((2, 3))
        loss(private(batch[rank])).backward()
        assert_grads(private, clipped_sum(alone, torch.cat(batch)))


@case
def accumulated_over_steps(rank: int) -> None:
    """With and without the reduction of each step; FSDP2 keeps whole gradients where it reduces once."""
    for synchronous in (True, False):
        model = tied()
        alone = copy.deepcopy(model)
        private: Any = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
        first, second = ids((2, 3)), ids((1, 4), seed=1)
        private.set_requires_gradient_sync(synchronous)
        loss(private(first[rank])).backward()
        private.set_requires_gradient_sync(True)
        loss(private(second[rank])).backward()
        sums = [clipped_sum(alone, torch.cat(batch)) for batch in (first, second)]
        assert_grads(private, {name: sums[0][name] + sums[1][name] for name in sums[0]})


@case
def accumulated_through_inductor(rank: int) -> None:
    """Equal layers: Inductor gives one layer's sums the memory of those that it has handed over."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]).double()
    alone = copy.deepcopy(model)
    private: Any = fxgrad.transform(units(model, list(model)[::2]), quantity=fxgrad.ClippedGrad(C))
    expected = {name: torch.zeros_like(p) for name, p in alone.named_parameters()}
    for synchronous in (False, False, True):
        batch = list(torch.randn(5, 8, dtype=torch.float64).split([3, 2]))
        private.set_requires_gradient_sync(synchronous)
        loss(private(batch[rank])).backward()
        expected = {name: g + expected[name] for name, g in clipped_sum(alone, torch.cat(batch)).items()}
    assert_grads(private, expected)


@case
def divided_by_a_factor_of_the_user(rank: int) -> None:
    model = tied()
    alone = copy.deepcopy(model)
    private: Any = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    for part in (private, *cast(Any, model).blocks):
        part.set_gradient_divide_factor(1.0)
    batch = ids((2, 3))
    loss(private(batch[rank])).backward()
    assert_grads(private, {name: WORLD * g for name, g in clipped_sum(alone, torch.cat(batch)).items()})


@case
def evaluated_between_forward_and_backward(rank: int) -> None:
    """Parameters that were freed meanwhile are gathered again."""
    model = tied()
    alone = copy.deepcopy(model)
    private: Any = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = ids((2, 3))
    outputs = private(batch[rank])
    with torch.no_grad():
        assert torch.allclose(private(batch[rank]), outputs)
    for part in (private, *cast(Any, model).blocks):
        part.reshard()
    loss(outputs).backward(retain_graph=True)
    expected = clipped_sum(alone, torch.cat(batch))
    assert_grads(private, expected)
    loss(outputs).backward()
    assert_grads(private, {name: 2 * g for name, g in expected.items()})


@case
def stepped_after_a_forward_alone(rank: int) -> None:
    """A forward without a backward leaves whole parameters, which a step of the optimizer makes old."""
    model = tied()
    alone = copy.deepcopy(model)
    private = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (private, alone))
    batch = ids((2, 3))
    loss(private(batch[rank])).backward()
    expected = clipped_sum(alone, torch.cat(batch))
    for name, parameter in alone.named_parameters():
        parameter.grad = expected[name]
    private(batch[rank])
    optimizer.step()
    other.step()
    private.zero_grad()
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sum(alone, torch.cat(batch)))


@case
def gradients_of_inputs_alone(rank: int) -> None:
    """`autograd.grad` leaves p.grad as it is, and the next step is right."""
    torch.manual_seed(0)
    model: Any = Sequences().double()
    alone = copy.deepcopy(model)
    model = units(model, [model.rnn])
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = list(torch.randn(5, 3, 3, dtype=torch.float64).split([2, 3]))
    x = batch[rank].clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(private(x)), x)
    y = batch[rank].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(alone(y)), y)
    assert torch.allclose(found, expected)
    assert all(p.grad is None for p in private.parameters())
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sum(alone, torch.cat(batch)))


@case
def hooks_and_classes_are_there_afterwards(rank: int) -> None:
    """The original model trains on as FSDP2 has it, with the user's hooks, once the guard is released."""
    model: Any = units(tied())
    plain: Any = units(tied())
    seen: list[str] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append("first"), prepend=True)
    model.blocks[0].register_forward_hook(lambda *_: seen.append("last"))
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = ids((2, 3))
    loss(private(batch[rank])).backward()
    kinds = [type(part) for part in model.modules()]
    assert [kind.__name__ for kind in kinds] == [type(part).__name__ for part in plain.modules()]
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(one).get("_is_fsdp_managed_module") == vars(other).get("_is_fsdp_managed_module")
    fxgrad.release(private)
    private.zero_grad()
    seen.clear()
    loss(model(batch[rank])).backward()
    loss(plain(batch[rank])).backward()
    assert seen == ["first", "last"]
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor()), name


@case
def parameters_that_no_forward_uses(rank: int) -> None:
    """A process with samples reduces what one without does: p.grad is zero where nothing was sent."""
    model = tied()
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    alone = copy.deepcopy(model)
    private = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    for sizes in ((0, 3), (2, 3)):
        batch = ids(sizes)
        private.zero_grad()
        loss(private(batch[rank])).backward()
        expected = {"unused": torch.zeros(3, dtype=torch.float64)}
        assert_grads(private, expected | clipped_sum(alone, torch.cat(batch)))


@case
def collectives_of_a_step(rank: int) -> None:
    """One gather and one reduction of each of four units; plain FSDP2 and compiled graphs gather three again."""
    backends = ("eager", "aot_eager")
    private = [fxgrad.transform(units(tied()), quantity=fxgrad.ClippedGrad(C), backend=one) for one in backends]
    batch = ids((2, 3))
    counts = []
    for model in (units(tied()), *private):
        loss(model(batch[rank])).backward()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            loss(model(batch[rank])).backward()
        counts.append({one.key: one.count for one in seen.key_averages() if one.key.startswith("c10d::")})
    assert counts[0] == {"c10d::_allgather_base_": 7, "c10d::_reduce_scatter_base_": 4}, counts[0]
    assert counts[1] == {"c10d::_allgather_base_": 4, "c10d::_reduce_scatter_base_": 4}, counts[1]
    assert counts[2] == counts[0], counts[2]


# Other quantities


@case
def results_of_the_local_samples(rank: int) -> None:
    model = tied()
    alone = copy.deepcopy(model)
    gradient = {name: torch.randn_like(p) for name, p in alone.named_parameters()}
    for value in gradient.values():
        dist.broadcast(value, 0)
    quantities = [
        fxgrad.NormSample(),
        fxgrad.GradDot(gradient),
        fxgrad.GradGram(),
        fxgrad.GradProjection(8, seed=3),
        fxgrad.Grad(),
    ]
    private = fxgrad.transform(units(model), quantity=quantities, backend="eager")
    beside = fxgrad.transform(alone, quantity=quantities, backend="eager")
    for sizes in ((2, 3), (1, 4)):
        batch = ids(sizes)
        private.zero_grad()
        beside.zero_grad()
        loss(private(batch[rank])).backward()
        loss(beside(batch[rank])).backward()
        for quantity in quantities[:-1]:
            found, expected = fxgrad.result(private, quantity), fxgrad.result(beside, quantity)
            assert torch.allclose(found, expected, rtol=1e-10), quantity
        sums = {name: p.grad for name, p in alone.named_parameters()}
        for grad in sums.values():
            dist.all_reduce(grad)
        assert_grads(private, {name: grad / WORLD for name, grad in sums.items() if grad is not None})


@case
def other_ways_to_clip(rank: int) -> None:
    names = [name for name, _ in tied(blocks=1).named_parameters()]
    for quantity in (
        fxgrad.ClippedGrad(C, groups="per_parameter"),
        fxgrad.ClippedGrad(C, weights="automatic"),
        fxgrad.ClippedGrad([C, 2 * C], groups=[names[:2], names[2:]]),
    ):
        model = tied(blocks=1)
        alone = copy.deepcopy(model)
        private = fxgrad.transform(units(model), quantity=quantity, backend="eager")
        beside = fxgrad.transform(alone, quantity=quantity, backend="eager")
        batch = ids((3, 2))
        loss(private(batch[rank])).backward()
        loss(beside(torch.cat(batch))).backward()
        assert_grads(private, {name: p.grad / WORLD for name, p in alone.named_parameters() if p.grad is not None})


# Refused


@case
def results_that_belong_to_whole_parameters(rank: int) -> None:
    private = fxgrad.transform(units(tied()), quantity=fxgrad.GradSample(), backend="eager")
    refused(OptionError, "grad_sample", partial(private, ids((2, 3))[rank]))


@case
def gradients_past_the_clipping(rank: int) -> None:
    model: Any = units(tied())
    private: Any = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = ids((2, 3))
    loss(private(batch[rank])).backward()
    private.zero_grad()
    refused(UnclippedGrad, "not clipped", lambda: loss(model(batch[rank])).backward())
    for part in (model, *model.blocks):
        part.reshard()
    assert all(p.grad is None for p in model.parameters())


@case
def two_forwards_in_a_backward(rank: int) -> None:
    private = fxgrad.transform(units(tied()), quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = ids((2, 3))
    refused(AlreadySet, "two forwards", lambda: (loss(private(batch[rank])) + loss(private(batch[rank]))).backward())


@case
def a_unit_around_the_transformed_model(rank: int) -> None:
    inner: Any = tied()
    private = fxgrad.transform(inner, quantity=fxgrad.ClippedGrad(C), backend="eager")
    for block in inner.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (WORLD,)))
    outer: Any = fully_shard(nn.Sequential(private), mesh=init_device_mesh("cpu", (WORLD,)))
    refused(OptionError, "around the transformed model", lambda: outer(ids((2, 3))[rank]))


@case
def what_does_not_know_shards(rank: int) -> None:
    model: Any = units(tied())
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    x = ids((2, 3))[rank]
    for name, run in {
        "explain": lambda: fxgrad.explain(private, x),
        "verify": lambda: fxgrad.verify(private, x),
        "warm_up": lambda: fxgrad.warm_up(private, x),
        "check_first_batch": lambda: fxgrad.transform(model, check_first_batch=True),
    }.items():
        refused(FxgradError, name, run)
    late: Any = tied()
    later = fxgrad.transform(late, check_first_batch=True, quantity=fxgrad.ClippedGrad(C), backend="eager")
    units(late)
    refused(OptionError, "check_first_batch", partial(later, x))
    prepared, _optimizer = _private(tied())
    units(prepared)
    refused(OptionError, "make_private", partial(prepared, x))
    offloaded = units(tied(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    refused(OptionError, "offload", lambda: fxgrad.transform(offloaded, backend="eager")(x))


def _private(model: nn.Module) -> Any:
    from opacus import PrivacyEngine

    import fxgrad.opacus

    return fxgrad.opacus.make_private(
        PrivacyEngine(accountant="rdp"),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 4, dtype=torch.long)), 4),
        noise_multiplier=1.0,
        max_grad_norm=C,
        one_backward=True,
        independent=True,
        check_first_batch=False,
        backend="eager",
    )[:2]


def main(rank: int, folder: Path, cases: Mapping[str, Callable[[int], None]], world: int = WORLD) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    found: dict[str, str] = {}
    for name, run in cases.items():
        if len(sys.argv) > 3 and name not in sys.argv[3:]:
            continue
        print("case", name, flush=True)  # seen where a signal ends the process
        began, computed = time.perf_counter(), time.process_time()
        try:
            run(rank)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            print(found[name], flush=True)  # if the processes do not meet again
        print(f"  {time.perf_counter() - began:.1f} s, CPU {time.process_time() - computed:.1f} s", flush=True)
        torch.save(found, folder / f"{rank}.pt")
        failed = torch.tensor(bool(found[name]))
        dist.all_reduce(failed, dist.ReduceOp.MAX)  # the other may wait in a collective: nothing after it would meet
        if failed:
            break


if __name__ == "__main__":
    import tests.sharded_gram
    import tests.sharded_machines
    import tests.sharded_memory
    import tests.sharded_misuse
    import tests.sharded_more  # noqa: F401 - registers its cases in tests.sharded_processes, which __main__ is not
    from tests import sharded_processes

    sharded_processes.main(int(sys.argv[1]), Path(sys.argv[2]), sharded_processes.CASES)
