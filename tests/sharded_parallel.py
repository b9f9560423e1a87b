"""One of four processes with models that are divided twice: `python -m tests.sharded_parallel RANK FOLDER`.

Each case compares what FSDP2 around tensor parallelism leaves with the loop over single samples of all batches, in one
process. A process's rank is 2 * dp + tp: those of one dp have one batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.api import engine_of
from fxgrad.host.fsdp import local_part
from fxgrad.testing import per_sample_grads
from tests.parallel_processes import Llama, Mlp, Transformer, divided_llama, ids, made, norm_of, norms_of, values
from tests.sharded_processes import C, loss, main

WORLD, STEPS = 4, 10
SIZES = [(0, 7), (1, 7), (2, 1), (3, 3), (1, 0), (0, 0)]  # of the batches, over dp
CASES: dict[str, Callable[[int], None]] = {}
LONG = """mlp_by_inductor mlp_by_eager transformer transformer_by_aot thin_meshes tied checkpoints_of_activations
transformed_between sharded_along_columns reduced_precision evaluated_between plain_again""".split()
Divide = Callable[[Any], Any]


def case(run: Callable[[int], None]) -> Callable[[int], None]:
    CASES[run.__name__] = run
    return run


@functools.cache
def grid(*shape: int) -> DeviceMesh:
    """Return a mesh of all processes, whose last dimension is that of tensor parallelism."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("copy", "dp", "tp")[-len(shape) :])


def units(model: Any, mesh: DeviceMesh, *blocks: nn.Module, **options: Any) -> Any:
    """Shard blocks, and the whole around them, over all dimensions but "tp"."""
    over = mesh["copy", "dp"] if mesh.ndim == 3 else mesh["dp"]
    for block in (*blocks, model):
        fully_shard(block, mesh=over, **options)
    return model


def divided_mlp(mesh: DeviceMesh, **options: Any) -> Divide:
    def divide(model: Any) -> Any:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return units(model, mesh, model.up, **options)

    return divide


class DividedSequence(Transformer):
    """A transformer whose values between the blocks are divided along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(self.table(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divided_transformer(mesh: DeviceMesh, **options: Any) -> Divide:
    def divide(model: Any) -> Any:
        whole, part = Replicate(), Shard(1)
        plan: dict[str, ParallelStyle] = {f"attention.{one}": ColwiseParallel(input_layouts=part) for one in "qkv"}
        plan |= {f"{one}": SequenceParallel(use_local_output=True) for one in ("first", "second")}
        plan |= {one: RowwiseParallel(output_layouts=part) for one in ("attention.out", "mlp.down")}
        plan |= {"mlp.up": ColwiseParallel(input_layouts=part)}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        around: dict[str, ParallelStyle] = {
            "enter": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "norm": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
        }
        parallelize_module(model, mesh["tp"], around)
        return units(model, mesh, *model.blocks, **options)

    return divide


def clipped_sum(alone: nn.Module, x: Tensor, processes: int) -> dict[str, Tensor]:
    """Return the clipped sum by the loop over single samples, averaged as FSDP2 averages."""
    rows = per_sample_grads(alone, loss, (x,))
    factors = (C / (norms_of(rows) + 1e-6)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factors, g) / processes for name, g in rows.items()}


def assert_same(found: nn.Module, expected: nn.Module, divide: Divide, grads: bool, tolerance: float) -> None:
    """Compare local parts of parameters, or of p.grad, with those of a model that is divided in the same way."""
    other = copy.deepcopy(expected)
    if grads:
        for p, q in zip(other.parameters(), expected.parameters(), strict=True):
            assert q.grad is not None
            p.data = q.grad
    scale = max(1e-30, *(float(p.detach().abs().max()) for p in other.parameters()))
    for (name, p), q in zip(found.named_parameters(), divide(other).parameters(), strict=True):
        one: Any = p.grad if grads else p
        assert type(one) is type(q.data) or not grads, name
        assert one.device_mesh == q.device_mesh and one.placements == q.placements, (name, one.placements)
        here, there = local_part(one).detach().double(), local_part(q).detach().double()
        assert here.shape == there.shape, name
        error = float((here - there).abs().max()) / scale if here.numel() else 0.0
        assert error <= tolerance, (name, "p.grad" if grads else "p", error)


def trains(
    mesh: DeviceMesh,
    model: Any,
    divide: Divide,
    samples: Callable[..., Tensor],
    *shape: int,
    backend: str = "aot_eager",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    steps: int = STEPS,
    sizes: Sequence[tuple[int, ...]] = SIZES,
    late: bool = False,
) -> None:
    """Take private steps of AdamW beside the same model in one process, with the gradients of the loop."""
    place, processes = dist.get_rank() // mesh.size(mesh.ndim - 1), mesh.size() // mesh.size(mesh.ndim - 1)
    alone, net = copy.deepcopy(model), copy.deepcopy(model).to(dtype)
    norms = fxgrad.NormSample()
    options: dict[str, Any] = {"quantity": [fxgrad.ClippedGrad(C), norms], "backend": backend}
    private = divide(fxgrad.transform(net, **options)) if late else fxgrad.transform(divide(net), **options)
    # A larger eps than usual: where a gradient is next to nothing, Adam's first steps are as large as elsewhere.
    optimizer, other = (
        torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-4, foreach=False) for one in (private, alone)
    )
    for step in range(steps):
        counts = [sizes[step % len(sizes)][i % 2] for i in range(processes)]
        batches = samples(sum(counts), *shape, seed=step).split(counts)
        mine = batches[place].to(dtype) if batches[place].is_floating_point() else batches[place]
        fxgrad.zero_grad(private)
        loss(private(mine)).backward()
        for name, g in clipped_sum(alone, torch.cat(batches), processes).items():
            alone.get_parameter(name).grad = g
        assert_same(private, alone, divide, grads=True, tolerance=tolerance)
        rows = per_sample_grads(alone, loss, (batches[place],)) if counts[place] else {}
        for name, g in rows.items():
            error = (norm_of(private.get_parameter(name)).double() - g.flatten(1).norm(dim=1)).abs().max()
            assert error <= 10 * tolerance * float(norms_of(rows).max()), (name, float(error))
        if rows:
            assert torch.allclose(fxgrad.result(private, norms).double(), norms_of(rows), rtol=10 * tolerance, atol=0)
        optimizer.step()
        other.step()
    assert_same(private, alone, divide, grads=False, tolerance=tolerance)


# Equal to the loop


@case
def mlp(rank: int) -> None:
    trains(grid(2, 2), made(Mlp), divided_mlp(grid(2, 2)), values, 6)


@case
def mlp_by_eager(rank: int) -> None:
    """Five is odd, so shards are uneven."""
    trains(grid(2, 2), made(Mlp, 5), divided_mlp(grid(2, 2)), values, 5, backend="eager")


@case
def mlp_by_inductor(rank: int) -> None:
    options: Any = {"backend": "inductor", "dtype": torch.float32, "tolerance": 1e-5}
    trains(grid(2, 2), made(Mlp), divided_mlp(grid(2, 2)), values, 6, **options)


@case
def transformer(rank: int) -> None:
    trains(grid(2, 2), made(DividedSequence), divided_transformer(grid(2, 2)), ids, 4, backend="eager")


@case
def transformer_by_aot(rank: int) -> None:
    trains(grid(2, 2), made(DividedSequence), divided_transformer(grid(2, 2)), ids, 4)


@case
def llama(rank: int) -> None:
    """As torchtitan divides it: PrepareModuleInput, and the table by rows."""
    mesh = grid(2, 2)

    def divide(model: Any) -> Any:
        return units(divided_llama(model, mesh["tp"]), mesh, *model.layers)

    trains(mesh, made(Llama, layers=1), divide, ids, 4, steps=3, backend="eager")


@case
def replicated_meshes(rank: int) -> None:
    """HSDP around tensor parallelism: one dimension copies, one shards, one divides the layers."""
    for shape in ((2, 1, 2), (1, 2, 2)):
        trains(grid(*shape), made(Mlp), divided_mlp(grid(*shape)), values, 6, steps=3, backend="eager")


@case
def thin_meshes(rank: int) -> None:
    for shape in ((4, 1), (1, 4)):
        trains(grid(*shape), made(Mlp, 8), divided_mlp(grid(*shape)), values, 8, steps=3, backend="eager")


@case
def transformed_before(rank: int) -> None:
    """The model is divided behind `fxgrad.transform`."""
    mesh = grid(2, 2)
    trains(mesh, made(Mlp), divided_mlp(mesh), values, 6, steps=3, backend="eager", late=True)


@case
def transformed_between(rank: int) -> None:
    """`fully_shard` comes behind `fxgrad.transform`, and behind a step."""
    mesh, model = grid(2, 2), made(Mlp)
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net: Any = parallelize_module(copy.deepcopy(model), mesh["tp"], plan)
    private = fxgrad.transform(net, quantity=fxgrad.ClippedGrad(C), backend="eager")
    loss(private(batches()[0])).backward()
    fxgrad.zero_grad(private)
    units(private, mesh, net.up)
    for seed, sizes in enumerate(((2, 3), (0, 3))):
        batch = batches(seed, sizes)
        loss(private(batch[rank // 2])).backward()
        assert_sum(private, model, clipped_sum(model, torch.cat(batch), 2))
        fxgrad.zero_grad(private)


@case
def sharded_along_columns(rank: int) -> None:
    """FSDP2 divides matrices along their second dimension."""

    def place(p: Tensor) -> Any:
        return Shard(1) if p.dim() == 2 else None

    mesh = grid(2, 2)
    trains(mesh, made(Mlp, 8), divided_mlp(mesh, shard_placement_fn=place), values, 8, steps=3, backend="eager")


@case
def reduced_precision(rank: int) -> None:
    """The policy's dtype is that of the call, and p.grad is the parameters' own."""
    mesh, policy = grid(2, 2), MixedPrecisionPolicy(torch.float32, torch.float64)
    trains(mesh, made(Mlp), divided_mlp(mesh, mp_policy=policy), values, 6, steps=3, tolerance=1e-5, backend="eager")


class TiedMlp(nn.Module):
    """The table of words, divided along its columns, is the head's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp, self.head = nn.Embedding(7, 6), Mlp(), nn.Linear(6, 7)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.table(x)))


@case
def tied(rank: int) -> None:
    mesh = grid(2, 2)

    def divide(model: Any) -> Any:
        plan: dict[str, ParallelStyle] = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        plan |= {
            "table": ColwiseParallel(output_layouts=Replicate()),
            "head": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        model.head.weight = model.table.weight  # parallelize_module gives each a parameter of its own
        return units(model, mesh, model.mlp)

    trains(mesh, made(TiedMlp), divide, ids, 3, steps=5, backend="eager")


# What a training loop does


def pair(quantity: Any, **options: Any) -> tuple[Any, Any]:
    """Return a transformed Mlp, divided over a mesh, and the same model in one process."""
    model = made(Mlp)
    return fxgrad.transform(
        divided_mlp(grid(2, 2), **options)(copy.deepcopy(model)), quantity=quantity, backend="eager"
    ), model


def batches(seed: int = 0, sizes: Sequence[int] = (2, 3)) -> list[Tensor]:
    return list(values(sum(sizes), 6, seed=seed).split(list(sizes)))


def assert_sum(private: Any, alone: nn.Module, grads: Any) -> None:
    for name, p in alone.named_parameters():
        p.grad = grads.get(name)
    assert_same(private, alone, divided_mlp(grid(2, 2)), grads=True, tolerance=1e-10)


@case
def accumulated(rank: int) -> None:
    """Over two backwards, with the reduction of each or of both at once; `Grad` over two forwards in one."""
    for synchronous in (True, False):
        private, alone = pair(fxgrad.ClippedGrad(C))
        first, second = batches(), batches(1, (0, 3))
        private.set_requires_gradient_sync(synchronous)
        loss(private(first[rank // 2])).backward()
        private.set_requires_gradient_sync(True)
        loss(private(second[rank // 2])).backward()
        sums = [clipped_sum(alone, torch.cat(one), 2) for one in (first, second)]
        assert_sum(private, alone, {name: sums[0][name] + sums[1][name] for name in sums[0]})
    private, alone = pair(fxgrad.Grad())
    (loss(private(first[rank // 2])) + loss(private(second[rank // 2]))).backward()
    (loss(alone(torch.cat(first))) + loss(alone(torch.cat(second)))).backward()
    assert_sum(private, alone, {name: p.grad / 2 for name, p in alone.named_parameters()})


@case
def frozen_between_steps(rank: int) -> None:
    private, alone = pair(fxgrad.ClippedGrad(C))
    for step, frozen in enumerate(((), ("up.weight", "down.bias"), ("down.weight",), ())):
        for one in (private, alone):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name not in frozen)
        fxgrad.zero_grad(private)
        batch = batches(step)
        loss(private(batch[rank // 2])).backward()
        expected = clipped_sum(alone, torch.cat(batch), 2)
        for name, p in private.named_parameters():
            assert (p.grad is None) is (name in frozen), name
            if name in frozen:
                p.grad = torch.zeros_like(p)
        zeros = {name: torch.zeros_like(p) for name, p in alone.named_parameters()}
        assert_sum(private, alone, zeros | expected)


@case
def evaluated_between(rank: int) -> None:
    """An evaluation between a forward and its backward frees parameters; a step behind a forward makes them old."""
    private, alone = pair(fxgrad.ClippedGrad(C))
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (private, alone))
    batch = batches()
    outputs = private(batch[rank // 2])
    with torch.no_grad():
        assert torch.allclose(private(batch[rank // 2]), outputs)
    for part in (private, private.up):
        part.reshard()
    loss(outputs).backward()
    expected = clipped_sum(alone, torch.cat(batch), 2)
    assert_sum(private, alone, expected)
    private(batch[rank // 2])
    optimizer.step()
    other.step()
    fxgrad.zero_grad(private)
    loss(private(batch[rank // 2])).backward()
    assert_sum(private, alone, clipped_sum(alone, torch.cat(batch), 2))


@case
def after_an_error(rank: int) -> None:
    """A backward that raised leaves nothing for the next one."""
    private, alone = pair(fxgrad.ClippedGrad(C))
    batch = batches()

    def fail(g: Tensor) -> None:
        raise ValueError("on purpose")

    for _ in range(2):
        x = batch[rank // 2].clone().requires_grad_()
        x.register_hook(fail)
        with contextlib.suppress(ValueError):
            loss(private(x)).backward()
        assert all(p.grad is None for p in private.parameters())
        private.reset_iter_state()
    loss(private(batch[rank // 2])).backward()
    assert_sum(private, alone, clipped_sum(alone, torch.cat(batch), 2))


@case
def checkpoints_of_activations(rank: int) -> None:
    class Recomputed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    mesh = grid(2, 2)
    trains(mesh, made(Recomputed), divided_mlp(mesh), values, 6, steps=3, backend="eager")


@case
def memory_of_a_step(rank: int) -> None:
    """Behind a backward nothing whole is left: no parameter, no gradient."""
    private, _ = pair(fxgrad.ClippedGrad(C))
    loss(private(batches()[rank // 2])).backward()
    division: Any = engine_of(private).units  # type: ignore[union-attr]
    shards = {id(p) for p in private.parameters()}
    others = {id(p): p for p in division.parameters() if id(p) not in shards}.values()
    assert len(others) == 8  # four whole ones, and their local parts
    assert all(p.grad is None and local_part(p).untyped_storage().size() == 0 for p in others)
    assert not division.layers.grads


@case
def plain_again(rank: int) -> None:
    """The model itself goes on as PyTorch has it, between transformed calls, too."""
    model = divided_mlp(grid(2, 2))(made(Mlp))
    x = batches()[rank // 2]
    before = model(x).detach()
    private = fxgrad.transform(model, quantity=fxgrad.Grad(), backend="eager")
    loss(private(x)).backward()
    grads = [local_part(p.grad).clone() for p in private.parameters()]
    fxgrad.zero_grad(private)
    loss(model(x)).backward()
    for grad, p in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(grad, local_part(p.grad), rtol=1e-10, atol=1e-12)
    assert torch.allclose(model(x), before)


if __name__ == "__main__":
    import tests.sharded_parallel_refusals
    from tests.sharded_parallel import CASES as EVERY  # not those of __main__

    assert tests.sharded_parallel_refusals.CASES is EVERY
    named = sys.argv[3:]
    main(
        int(sys.argv[1]),
        Path(sys.argv[2]),
        {name: run for name, run in EVERY.items() if name not in LONG or name in named},
        WORLD,
    )
