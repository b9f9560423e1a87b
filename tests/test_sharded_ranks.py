"""FSDP2 at 64 ranks, each alone with a group that moves nothing: all of them meet in the same collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxgrad
from tests.sharded_processes import Tied, loss

WORLD = 64
COLLECTIVES = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_")
Sequence = list[tuple[str, object]]


def steps(rank: int, backend: str, sizes: tuple[int, ...]) -> list[Sequence]:
    """Return the collectives of a step with each batch size, by their names and the shapes of what they move."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        private = fxgrad.transform(sharded(), quantity=fxgrad.ClippedGrad(1.0), backend=backend)
        return [collectives(private, torch.randint(7, (size, 4))) for size in sizes]
    finally:
        dist.destroy_process_group()


def sharded() -> nn.Module:
    """Return a model in four units, no two of one size."""
    torch.manual_seed(0)
    model: Any = Tied().double()
    mesh = init_device_mesh("cpu", (WORLD,))
    for i, block in enumerate(model.blocks):
        block.up, block.down = nn.Linear(5, 8 + i).double(), nn.Linear(8 + i, 5).double()
        fully_shard(block, mesh=mesh)
    whole: nn.Module = fully_shard(model, mesh=mesh)
    return whole


def collectives(private: nn.Module, ids: Tensor) -> Sequence:
    for _ in range(2):  # the first call of a size compiles
        private.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            loss(private(ids)).backward()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [(one.name, str(one.input_shapes)) for one in events if one.name in COLLECTIVES]


@pytest.mark.parametrize(("backend", "gathers"), [("aot_eager", 7), pytest.param("eager", 4, marks=pytest.mark.long)])
def test_one_sequence_of_collectives(backend: str, gathers: int) -> None:
    """Of every batch size, on the first rank and on the last, whose shards are empty."""
    first, *others = [step for rank in (0, WORLD - 1) for step in steps(rank, backend, (4, 1, 3, 0))]
    names = [name for name, _ in first]
    assert [names.count(name) for name in COLLECTIVES] == [gathers, 4, 0]
    assert len({shapes for _, shapes in first}) == 8  # of four units: a swap would be seen
    for other in others:
        assert other == first
