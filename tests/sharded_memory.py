"""More cases of tests/sharded_processes.py: how much is whole at a time in a clipping step, and who reduces when."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import fxgrad
import fxgrad.host.fsdp as host
from tests.sharded_processes import WORLD, C, assert_grads, case, clipped_sum, ids, loss, refused, tied, units

UNITS = 5


class Layers(nn.Module):
    """Layers whose parameters are much larger than what a few rows make of them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Whole:
    """Sees every gradient that goes into a reduction, and how many bytes of them live at a time, at most."""

    def __init__(self) -> None:
        self.seen: list[tuple[StorageWeakRef, int]] = []
        self.most = self.calls = 0
        self.original = host.reduce_group

    def __call__(self, group: Any, gradients: Sequence[Tensor]) -> Any:
        self.calls += 1
        storages = [g.untyped_storage() for g in gradients]
        self.seen += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
        self.most = max(self.most, sum(size for one, size in self.seen if not one.expired()))
        return self.original(group, gradients)


@case
def whole_gradients_of_a_step(rank: int) -> None:
    """At most those of two units live at a time, whatever the backend."""
    gc.collect()  # what other cases have left
    batch = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).split([2, 3])
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        model: Any = Layers()
        alone = copy.deepcopy(model)
        private = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend=backend)
        with patch.object(host, "reduce_group", Whole()) as whole:
            loss(private(batch[rank])).backward()
        assert whole.calls == UNITS, whole.calls
        unit = sum(p.numel() * p.element_size() for p in alone.blocks[0].parameters())
        assert unit <= whole.most <= 2 * unit, (backend, whole.most / unit)
        assert_grads(private, clipped_sum(alone, torch.cat(batch)), tolerance=1e-4)


class Copies(Whole):
    """The same of every gathered unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = host.copies_of

    def __call__(self, group: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        copies = self.gather(group)
        storages = [copy.untyped_storage() for copy in copies]
        self.seen += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
        self.most = max(self.most, sum(size for one, size in self.seen if not one.expired()))
        return copies


@case
def whole_parameters_of_a_step(rank: int) -> None:
    """Those of two units live at a time; each is gathered twice, and where the user keeps them, once."""
    batch = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).split([2, 3])
    for kept in (False, True):
        torch.manual_seed(0)
        model: Any = Layers()
        alone = copy.deepcopy(model)
        model = units(model, reshard_after_forward=not kept)
        private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="aot_eager")
        loss(private(batch[rank])).backward()
        private.zero_grad()
        with patch.object(host, "copies_of", Copies()) as copies:
            loss(private(batch[rank])).backward()
        unit = sum(p.numel() * p.element_size() for p in alone.blocks[0].parameters())
        assert copies.calls == (0 if kept else 2 * UNITS), copies.calls
        assert copies.most <= 2 * unit, copies.most / unit
        assert_grads(private, clipped_sum(alone, torch.cat(batch)), tolerance=1e-4)


class Watched:
    """A reduction that notes its unit in a list."""

    def __init__(self, unit: int, seen: list[int]) -> None:
        self.inner: Any = collectives.DefaultReduceScatter()
        self.unit, self.seen, self.allocate = unit, seen, self.inner.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(self.unit)
        return self.inner(*args, **kwargs)


@case
def reductions_in_one_order(rank: int) -> None:
    """For every size of a batch, on both processes, also where another model's units reduce in the same backward."""
    model: Any = tied(blocks=2)
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    alone = copy.deepcopy(model)
    private: Any = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="aot_eager")
    head: Any = nn.Linear(7, 2).double()
    fully_shard(head, mesh=init_device_mesh("cpu", (WORLD,)))
    seen: list[int] = []
    for i, part in enumerate((*model.blocks, private, head)):
        part.set_custom_reduce_scatter(Watched(i, seen))
    for sizes in ((2, 3), (1, 3), (0, 3), (0, 1), (0, 0)):
        batch = ids(sizes)
        private.zero_grad()
        head.zero_grad()
        seen.clear()
        outputs = private(batch[rank])
        (loss(outputs) + 0 * head(outputs.detach()).sum()).backward()
        every: list[Any] = [None] * WORLD
        dist.all_gather_object(every, seen)
        assert every[0] == every[1], (sizes, every)
        assert sorted(seen) == list(range(4)), (sizes, seen)
        expected = {"unused": torch.zeros(3, dtype=torch.float64)}
        assert_grads(private, expected | clipped_sum(alone, torch.cat(batch)))


@case
def the_ordinary_way_of_sums(rank: int) -> None:
    """Hooks of the user's and `backward(inputs=..)` see the whole gradients; both give the loop's sums."""
    model: Any = tied()
    alone = copy.deepcopy(model)
    private: Any = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    batch = ids((2, 3))
    expected = clipped_sum(alone, torch.cat(batch))
    seen: list[Tensor] = []
    outputs = private(batch[rank])
    hook = private.blocks[0].up.weight.register_hook(lambda g: seen.append(g.clone()))
    loss(outputs).backward()
    assert len(seen) == 1
    assert_grads(private, expected)
    hook.remove()
    private.zero_grad()
    outputs = private(batch[rank])
    whole = private.blocks[0].up.weight  # a shard again behind the backward
    (found,) = torch.autograd.grad(loss(outputs), [whole], retain_graph=True)
    assert torch.equal(found, seen[0])
    loss(outputs).backward(inputs=[whole])
    part = "blocks.0.up.weight"
    assert_grads(private, {n: g if n == part else torch.zeros_like(g) for n, g in expected.items()})
    private.zero_grad()
    kept: list[str] = []
    shard: Any = private.table.weight
    hook = shard.register_post_accumulate_grad_hook(lambda p: kept.append("table"))
    loss(private(batch[rank])).backward()
    hook.remove()
    assert kept == ["table"]
    assert_grads(private, expected)


@case
def graphs_that_gather_in_one_backward(rank: int) -> None:
    """Of two models, with batches of different sizes: both are the loop's; after a call that raised, too."""
    models: list[Any] = [tied(seed, blocks=1) for seed in (0, 1)]
    alone = [copy.deepcopy(model) for model in models]
    private: list[Any] = [
        fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="aot_eager") for model in models
    ]
    refused(Exception, "", lambda: private[0](torch.ones(2, 4)))  # an embedding takes integers
    assert all(isinstance(p, DTensor) for p in models[0].blocks.parameters())  # the root stays whole
    for sizes in ((2, 3), (0, 3)):
        batch = ids(sizes)
        for model in private:
            model.zero_grad()
        outputs = [model(batch[rank]) for model in private]
        assert all(isinstance(p, DTensor) for p in private[0].blocks.parameters()) == (sizes[rank] > 0)
        (loss(outputs[0]) + loss(outputs[1])).backward()
        for model, one in zip(private, alone, strict=True):
            assert_grads(model, clipped_sum(one, torch.cat(batch)))
