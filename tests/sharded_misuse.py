"""More cases of tests/sharded_processes.py: what goes wrong in a training loop, and what comes past the clipping."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxgrad
from fxgrad.errors import BatchSizeError, OptionError, UnclippedGrad
from tests.sharded_processes import (
    WORLD,
    C,
    assert_grads,
    case,
    clipped_sum,
    ids,
    loss,
    refused,
    tied,
    units,
)


def _clipping() -> tuple[Any, nn.Module, list[nn.Parameter], Tensor]:
    """Return a sharded model that clips, a copy of it on one process, the shards, and all token ids."""
    model = tied()
    alone = copy.deepcopy(model)
    private = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    return private, alone, list(private.parameters()), torch.cat(ids((2, 3)))


def _forget(shards: list[nn.Parameter]) -> None:
    for shard in shards:
        shard.grad = None


@case
def a_gradient_of_a_shard(rank: int) -> None:
    """FSDP2 adds to the shards without autograd: what autograd brings them is not clipped."""
    private, alone, shards, x = _clipping()
    mine = x[:2] if rank == 0 else x[2:]
    loss(private(mine)).backward()
    _forget(shards)
    table: Any = shards[0]
    refused(UnclippedGrad, "table.weight", lambda: loss(table.full_tensor()[mine]).backward())
    refused(UnclippedGrad, "table.weight", lambda: (loss(private(mine)) + loss(table.full_tensor()[mine])).backward())
    _forget(shards)
    loss(private(mine)).backward()
    assert_grads(private, clipped_sum(alone, x))


@case
def a_gradient_from_before_the_first_call(rank: int) -> None:
    private, alone, shards, x = _clipping()
    mine = x[:2] if rank == 0 else x[2:]
    for shard in shards:  # as a backward of the model before transform leaves it
        shard.grad = torch.ones_like(shard)
    refused(UnclippedGrad, "before the first transformed call", partial(private, mine))
    refused(UnclippedGrad, "before the first transformed call", partial(private, mine))
    _forget(shards)
    loss(private(mine)).backward()
    assert_grads(private, clipped_sum(alone, x))


@case
def a_step_between_forward_and_backward(rank: int) -> None:
    private, alone, shards, x = _clipping()
    mine = x[:2] if rank == 0 else x[2:]
    outputs = private(mine)
    with torch.no_grad():
        for one in (*shards, *alone.parameters()):
            one.mul_(0.5)
    refused(OptionError, "changed between a forward and its backward", lambda: loss(outputs).backward())
    with torch.no_grad():  # FSDP2 would not gather again what the call left whole
        assert torch.equal(private(mine), alone(mine))
    loss(private(mine)).backward()
    assert_grads(private, clipped_sum(alone, x))


@case
def a_backward_that_raised(rank: int) -> None:
    """What it has added to whole parameters is dropped: the optimizer, which clears shards, does not see it."""
    private, alone, shards, x = _clipping()
    mine = x[:2] if rank == 0 else x[2:]
    _raises(private, mine)
    _forget(shards)
    loss(private(mine)).backward()
    assert_grads(private, clipped_sum(alone, x))

    private.zero_grad()
    private.set_requires_gradient_sync(False)
    loss(private(mine)).backward()
    private.set_requires_gradient_sync(True)
    _raises(private, mine)
    for _ in range(2):
        refused(OptionError, "a backward raised", partial(private, mine))
    private.zero_grad()
    loss(private(mine)).backward()
    assert_grads(private, clipped_sum(alone, x))


def _raises(private: Any, x: Tensor) -> None:
    outputs = private(x)

    def fail(parameter: Tensor) -> None:
        raise ZeroDivisionError("a hook of the user's")

    hook = private.table.weight.register_post_accumulate_grad_hook(fail)
    refused(ZeroDivisionError, "a hook of the user's", lambda: loss(outputs).backward())
    hook.remove()


@case
def a_refused_sum_with_the_original_model(rank: int) -> None:
    """FSDP2 has marked some units as reduced when the guard raises; they are reduced in the next step all the same."""
    model: Any = tied()
    alone = copy.deepcopy(model)
    private: Any = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")
    shards, x = list(private.parameters()), torch.cat(ids((2, 3)))
    mine = x[:2] if rank == 0 else x[2:]
    loss(private(mine)).backward()
    _forget(shards)
    refused(UnclippedGrad, "outside of the transformed", lambda: (loss(private(mine)) + loss(model(mine))).backward())
    _forget(shards)
    loss(private(mine)).backward()
    assert_grads(private, clipped_sum(alone, x))


@case
def all_frozen(rank: int) -> None:
    """A gradient for the inputs, through units that an evaluation frees."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    alone = copy.deepcopy(model)
    private = fxgrad.transform(units(model, [model[0], model[1]]), quantity=fxgrad.ClippedGrad(C), backend="eager")
    x = torch.randn(2, 3, requires_grad=True)
    outputs = private(x)
    with torch.no_grad():
        private(x)
    (found,), (expected,) = (torch.autograd.grad(loss(y), x) for y in (outputs, alone(x)))
    assert torch.equal(found, expected)


@case
def more_units_after_transform(rank: int) -> None:
    model: Any = tied()
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model.blocks[0], mesh=mesh)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(private, mesh=mesh)
    batch = ids((2, 3))
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sum(alone, torch.cat(batch)))


@case
def an_empty_batch_in_a_unit_around(rank: int) -> None:
    private = fxgrad.transform(tied(), quantity=fxgrad.ClippedGrad(C), backend="eager")
    around = units(nn.Sequential(private), [])
    refused(BatchSizeError, "a unit of FSDP2 around", partial(around, ids((0, 0))[rank]))


@dataclass
class Output:
    logits: Tensor


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Output:
        return Output(self.layer(x))


@case
def a_dataclass_in_mixed_precision(rank: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    plain, model = (units(Wrapped(), [], mp_policy=policy) for _ in range(2))
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    x = torch.randn(2, 3)
    assert private(x).logits.dtype is plain(x).logits.dtype is torch.float32


@case
def a_call_that_raises_in_one_process(rank: int) -> None:
    """The other ends its call: the program may agree to make the call again."""
    for backend in ("eager", "aot_eager"):
        model = tied(blocks=1)
        alone = copy.deepcopy(model)
        private = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend=backend)
        batch = ids((2, 3))
        loss(private(batch[rank])).backward()
        private.zero_grad()
        if rank == 0:
            refused(IndexError, "out of range", partial(private, torch.full((2, 4), 99)))
        else:
            private(batch[rank])
        dist.barrier()
        loss(private(batch[rank])).backward()
        assert_grads(private, clipped_sum(alone, torch.cat(batch)))
