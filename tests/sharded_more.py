"""More cases of tests/sharded_processes.py: what the processes add up, what a program saves, and FSDP2's methods."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as parameter_groups
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.errors import AlreadySet, OptionError
from fxgrad.testing import per_sample_grads
from tests.sharded_processes import (
    SIZES,
    WORLD,
    C,
    Pictures,
    Tied,
    assert_grads,
    case,
    clipped_sum,
    ids,
    loss,
    refused,
    tied,
    units,
)

# What the processes add up


def assert_moments(model: nn.Module, alone: nn.Module, x: Tensor, tolerance: float = 1e-10) -> None:
    """Compare with the loop over the samples of all processes; each result is a DTensor placed as its parameter."""
    rows = per_sample_grads(alone, loss, (x,))
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert getattr(p, "grad_variance", None) is None, name
            continue
        g = rows[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one sample it is NaN
            variance = g.var(0) if len(g) else torch.zeros(p.shape)
        expected = {"squared_grad_sum": g.square().sum(0), "grad_variance": variance}
        for place, value in expected.items():
            found: Any = getattr(p, place)
            assert found.placements == p.placements and found.dtype is p.dtype, (name, place)  # type: ignore[attr-defined]
            whole = found.full_tensor()
            assert whole.isnan().equal(value.isnan()), (name, place)
            error = (whole - value).abs().nan_to_num().max() / value.abs().nan_to_num().max().clamp(min=1e-20)
            assert error <= tolerance, (name, place, float(error))


MOMENTS = [fxgrad.SquaredGrad(), fxgrad.GradVariance()]


@case
def moments_of_all_processes(rank: int) -> None:
    model = tied(blocks=1)
    alone = copy.deepcopy(model)
    private = fxgrad.transform(units(model), quantity=[fxgrad.Grad(), *MOMENTS], backend="eager")
    for i, sizes in enumerate(SIZES):
        batch = ids(sizes, i)
        private.zero_grad()
        loss(private(batch[rank])).backward()
        assert_moments(private, alone, torch.cat(batch))
        rows = per_sample_grads(alone, loss, (torch.cat(batch),))
        assert_grads(private, {name: g.sum(0) / WORLD for name, g in rows.items()})


@case
def moments_on_other_meshes_and_policies(rank: int) -> None:
    """HSDP, a whole mesh of replicas, blocks without a root, shards of the second dimension, bfloat16 in the call."""
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) for shape in ((1, 2), (2, 1))]
    one = init_device_mesh("cpu", (WORLD,))
    by_columns = {"shard_placement_fn": lambda p: Shard(p.ndim - 1 if p.shape[-1] % WORLD == 0 else 0)}
    for options in ({"mesh": meshes[0]}, {"mesh": meshes[1]}, {"mesh": one, **by_columns}):
        model = tied(width=4, blocks=1)
        alone = copy.deepcopy(model)
        private = units(fxgrad.transform(model, quantity=MOMENTS, backend="eager"), **options)
        batch = ids((0, 3))
        loss(private(batch[rank])).backward()
        assert_moments(private, alone, torch.cat(batch))
    model = tied(blocks=1).float()
    alone = copy.deepcopy(model).double()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    private = fxgrad.transform(units(model, mp_policy=policy), quantity=MOMENTS, backend="eager")
    batch = ids((2, 3))
    loss(private(batch[rank])).backward()
    assert_moments(private, alone, torch.cat(batch), tolerance=0.1)


def _keep(seen: list[Any], *result: Any) -> None:
    seen.append(result)


@case
def moments_of_groups_and_several_backwards(rank: int) -> None:
    """A sample of two rows; policies; frozen parameters; sharded behind a first call; on_result."""
    torch.manual_seed(0)
    batch, second = torch.randn(8, 3).double().split([2, 6]), torch.randn(4, 3).double().split([0, 4])
    for policy in ("sum", "append", "overwrite"):
        torch.manual_seed(1)
        grouped: list[Any] = [fxgrad.SquaredGrad()]
        if policy != "sum":  # variances of two backwards do not add up
            grouped.append(fxgrad.GradVariance(group_size=2))
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        alone = copy.deepcopy(model)
        seen: list[Any] = []
        private: Any = fxgrad.transform(
            model, quantity=grouped, backend="eager", accumulate=policy, on_result=partial(_keep, seen)
        )
        beside: Any = fxgrad.transform(alone, quantity=grouped, backend="eager", accumulate=policy)
        loss(private(torch.cat(batch))).backward()
        private.zero_grad()
        units(model, [model[0]])
        for x in (batch, second):
            for one in (private, beside):
                one[0].weight.requires_grad_(x is batch)
            loss(private(x[rank])).backward()
            loss(beside(torch.cat(x))).backward()
        for (name, p), q in zip(private.named_parameters(), beside.parameters(), strict=True):
            for place, quantity in zip(("squared_grad_sum", "grad_variance"), grouped, strict=False):
                found, expected = getattr(p, place), getattr(q, place)
                if not isinstance(found, list):  # one backward, where a parameter was frozen in the other
                    found, expected = [found], [expected]
                assert len(found) == len(expected), (name, place)
                for a, b in zip(found, expected, strict=True):
                    assert torch.allclose(a.full_tensor(), b, rtol=1e-10, atol=1e-12), (policy, name, place)
                if p.requires_grad:
                    of = dict(seen[-2:])[quantity][name]
                    assert of is getattr(p, place), (policy, name, place)


@case
def moments_are_refused_as_elsewhere(rank: int) -> None:
    private = fxgrad.transform(units(tied()), quantity=MOMENTS, backend="eager")
    x = ids((2, 3))[rank]
    first, second = private(x), private(x)
    loss(first).backward()
    refused(AlreadySet, "still set", lambda: loss(second).backward())
    private.zero_grad()
    loss(second).backward()
    refused(AlreadySet, "still set", partial(private, x))

    class Own(fxgrad.SquaredGrad):
        pass

    own = fxgrad.transform(units(tied()), quantity=Own(), backend="eager")
    refused(OptionError, "belongs to the whole parameter", partial(own, x))
    model: Any = tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), ignored_params={model.blocks[0].up.weight})
    ignoring = fxgrad.transform(model, quantity=MOMENTS, backend="eager")
    refused(OptionError, "blocks.0.up.weight", partial(ignoring, x))


# What a program saves and loads


def _step(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    loss(model(x)).backward()
    optimizer.step()


def _private(model: Any) -> tuple[Any, Any]:
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    return private, torch.optim.AdamW(private.parameters(), lr=0.01)


@case
def checkpoints(rank: int) -> None:
    """Saved by two processes, loaded by two, and by one with and without FSDP2: training goes on as it did."""
    private, optimizer = _private(units(tied(blocks=1)))
    for seed in range(2):
        _step(private, optimizer, ids((2, 3), seed)[rank])
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    names = ("model", "optimizer")
    save(dict(zip(names, get_state_dict(private, optimizer), strict=True)), checkpoint_id=folder[0])
    later = [ids((2, 3), seed) for seed in (2, 3)]
    for batch in later:
        _step(private, optimizer, batch[rank])
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("processes", "alone"))
    hybrid = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    builds: dict[str, Any] = {
        "two processes": units,
        "replicas": partial(units, mesh=hybrid),
        "one process under FSDP2": partial(units, mesh=mesh["alone"]),
        "one process": lambda model: model,
    }
    for name, build in builds.items():
        other = tied(seed=1, blocks=1)
        again, its = _private(build(other))
        model_state, optimizer_state = get_state_dict(again, its)
        load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
        set_state_dict(again, its, model_state_dict=model_state, optim_state_dict=optimizer_state)
        one = name.startswith("one")
        for batch in later:
            its.zero_grad()
            loss(again(torch.cat(batch) if one else batch[rank])).backward()
            for p in again.parameters() if one else ():
                p.grad /= WORLD
            its.step()
        for (parameter, p), q in zip(again.named_parameters(), private.parameters(), strict=True):
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            assert (whole - q.full_tensor()).abs().max() <= 1e-12, (name, parameter)
            if name == "two processes":
                assert torch.equal(whole, q.full_tensor()), (name, parameter)


# How a model begins


@case
def meta_device(rank: int) -> None:
    """Sharded on the meta device, transformed before or behind it, then `to_empty` and `reset_parameters`."""
    for late in (False, True):
        with torch.device("meta"):
            model: Any = Pictures().double()
        if not late:
            model = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
        units(model, [model.conv, model.norm])
        if late:
            model = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for part in (model.conv, model.norm, model.head):
            part.reset_parameters()
        alone = Pictures().double()
        alone.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})
        torch.manual_seed(4)
        batch = list(torch.randn(6, 1, 5, 5, dtype=torch.float64).split([2, 4]))
        for _ in range(2):
            model.zero_grad()
            loss(model(batch[rank])).backward()
            assert_grads(model, clipped_sum(alone, torch.cat(batch)))


class Adapted(nn.Module):
    """A frozen linear layer beside a trainable product of low rank, as LoRA has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lower, self.upper = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.upper(self.lower(x)).tanh()


@case
def frozen_parts_beside_adapters(rank: int) -> None:
    """A unit of frozen parameters alone, units of both kinds, and the moments beside."""
    torch.manual_seed(0)
    frozen = nn.Linear(5, 5).requires_grad_(False)
    model: Any = nn.Sequential(frozen, Adapted(5), Adapted(5), nn.Linear(5, 3)).double()
    alone = copy.deepcopy(model)
    quantities = [fxgrad.ClippedGrad(C), *MOMENTS]
    private = fxgrad.transform(units(model, list(model)[:3]), quantity=quantities, backend="eager")
    for sizes in ((2, 4), (0, 6)):
        whole = torch.randn(6, 5, dtype=torch.float64)
        batch = whole.split(list(sizes))
        private.zero_grad()
        loss(private(batch[rank])).backward()
        assert_grads(private, clipped_sum(alone, whole))
        assert_moments(private, alone, whole)


class Reentrant(Tied):
    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@case
def checkpoints_of_activations_that_reenter(rank: int) -> None:
    """Around the call, on both processes and on one without samples; and in the model."""
    model: Any = tied(blocks=1)
    alone = copy.deepcopy(model)
    private = fxgrad.transform(units(model), quantity=fxgrad.ClippedGrad(C), backend="eager")

    def run(like: Tensor) -> Tensor:
        return private(like.detach().long())

    for sizes in ((2, 3), (0, 3)):
        batch = ids(sizes)
        private.zero_grad()
        loss(checkpoint(run, batch[rank].double().requires_grad_(), use_reentrant=True)).backward()
        assert_grads(private, clipped_sum(alone, torch.cat(batch)))
    torch.manual_seed(0)
    inner = fxgrad.transform(units(Reentrant(blocks=1).double()), quantity=fxgrad.ClippedGrad(C), backend="aot_eager")
    loss(inner(batch[rank])).backward()
    assert_grads(inner, clipped_sum(alone, torch.cat(batch)))


@case
def two_forwards_of_the_ordinary_gradient(rank: int) -> None:
    """The gradients of the calls add up, as without FSDP2."""
    private, alone = fxgrad.transform(units(tied()), quantity=fxgrad.Grad(), backend="eager"), tied()
    batch = ids((2, 3))
    (loss(private(batch[rank])) + loss(private(batch[rank]))).backward()
    torch.stack([loss(alone(x)) for x in batch]).sum().backward()  # two calls each, over two processes
    assert_grads(private, {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})


# The methods of FSDPModule and UnshardHandle


def method(name: str) -> Callable[[Callable[[Small], None]], None]:
    """Register the case of one method, which earlier versions of PyTorch may not have."""

    def register(check: Callable[[Small], None]) -> None:
        def run(rank: int) -> None:
            kind, _, attribute = name.rpartition(".")
            if hasattr(UnshardHandle if kind else FSDPModule, attribute):
                check(Small(rank))

        run.__name__ = name
        case(run)

    return register


CLIPPED = fxgrad.ClippedGrad(C)


class Small:
    """A private model of two units, and its like on one process."""

    def __init__(self, rank: int, quantity: fxgrad.Quantity = CLIPPED, **options: Any) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.alone, self.rank = copy.deepcopy(model), rank
        self.inner = model[0]
        self.model: Any = fxgrad.transform(units(model, [self.inner], **options), quantity=quantity, backend="eager")
        self.x = torch.randn(5, 3, dtype=torch.float64)

    def forward(self) -> Tensor:
        return loss(self.model(self.x.split([2, 3])[self.rank]))

    def step(self, times: float = 1.0, tolerance: float = 1e-10) -> None:
        """Compare p.grad of one more step with the loop."""
        self.model.zero_grad()
        self.forward().backward()
        self.right(times, tolerance)

    def right(self, times: float = 1.0, tolerance: float = 1e-10) -> None:
        self.model.reshard()
        self.inner.reshard()
        expected = clipped_sum(self.alone, self.x)
        assert_grads(self.model, {name: times * g for name, g in expected.items()}, tolerance)

    def is_whole(self) -> list[bool]:
        return [not isinstance(part.weight, DTensor) for part in (self.inner, self.model[2])]

    def gathers(self) -> int:
        """Return the number of all-gathers of one step."""
        self.model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            self.forward().backward()
        return sum(one.count for one in seen.key_averages() if one.key == "c10d::_allgather_base_")


@method("unshard")
def _(small: Small) -> None:
    small.model.unshard()
    assert small.is_whole() == [False, True]
    small.step()
    small.model.unshard()
    with torch.no_grad():
        small.model.reshard()
        for p in (*small.model.parameters(), *small.alone.parameters()):
            p += 1  # the whole parameters of the next call are new ones
    small.step()


@method("UnshardHandle.wait")
def _(small: Small) -> None:
    small.model.unshard(async_op=True).wait()
    assert small.is_whole() == [False, True]
    small.step()
    small.inner.unshard(async_op=True)  # a call waits by itself
    small.step()


@method("reshard")
def _(small: Small) -> None:
    small.model.zero_grad()
    y = small.forward()
    assert small.is_whole() == [True, True]
    small.model.reshard()
    small.inner.reshard()
    assert small.is_whole() == [False, False]
    y.backward()
    small.right()


@method("reset_iter_state")
def _(small: Small) -> None:
    refused(Exception, "", lambda: small.model(small.x[:, :2]))
    small.model.reset_iter_state()
    assert small.is_whole() == [False, False]
    small.step()
    y = small.forward()
    y.register_hook(lambda g: 1 // 0)
    refused(ZeroDivisionError, "", y.backward)
    small.model.reset_iter_state()
    small.step()


@method("set_is_last_backward")
def _(small: Small) -> None:
    small.model.set_is_last_backward(False)
    small.forward().backward()
    small.model.set_is_last_backward(True)
    small.forward().backward()
    small.right(2)


@method("set_requires_gradient_sync")
def _(small: Small) -> None:
    small.model.set_requires_gradient_sync(False)
    small.forward().backward()
    small.model.reshard()
    assert all(p.grad is None for p in small.model.parameters())
    small.model.set_requires_gradient_sync(True)
    small.forward().backward()
    small.right(2)


@method("set_requires_all_reduce")
def _(small: Small) -> None:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    small = Small(small.rank, mesh=mesh)
    small.model.set_requires_all_reduce(False)
    small.forward().backward()
    small.model.set_requires_all_reduce(True)
    small.forward().backward()
    small.right(2)


@method("set_reshard_after_forward")
def _(small: Small) -> None:
    for after in (True, False):
        small.model.set_reshard_after_forward(after)
        small.model.zero_grad()
        y = small.forward()
        assert small.is_whole() == [True, True]
        y.backward()
        small.right()


@method("set_reshard_after_backward")
def _(small: Small) -> None:
    small.model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (small.model, small.alone)]
    assert small.gathers() == 2
    assert small.is_whole() == [True, True]
    small.right()
    for name, p in small.alone.named_parameters():
        p.grad = clipped_sum(small.alone, small.x)[name]
    for optimizer in optimizers:
        optimizer.step()
    small.forward().backward()
    assert small.gathers() == 2
    small.right()


@method("set_modules_to_forward_prefetch")
def _(small: Small) -> None:
    small.model.set_modules_to_forward_prefetch([small.inner])
    small.step()
    assert small.gathers() == 2


@method("set_modules_to_backward_prefetch")
def _(small: Small) -> None:
    small.model.set_modules_to_backward_prefetch([small.inner])
    small.step()
    assert small.gathers() == 2


@method("set_unshard_in_backward")
def _(small: Small) -> None:
    small.inner.set_unshard_in_backward(False)
    small.step()
    assert small.gathers() == 2


class Communication:
    """A user's own collective: PyTorch's, with what each call was given."""

    def __init__(self, name: str) -> None:
        self.inner, self.calls = getattr(collectives, name)(), list[dict[str, Any]]()
        self.allocate = self.inner.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return self.inner(*args, **kwargs)


@method("set_custom_all_gather")
def _(small: Small) -> None:
    small.inner.set_custom_all_gather(own := Communication("DefaultAllGather"))
    small.step()
    assert len(own.calls) == 1


@method("set_custom_reduce_scatter")
def _(small: Small) -> None:
    small.inner.set_custom_reduce_scatter(own := Communication("DefaultReduceScatter"))
    small.step()
    assert len(own.calls) == 1


@method("set_all_reduce_hook")
def _(small: Small) -> None:
    for part in (small.model, small.inner):
        part.set_all_reduce_hook(lambda output: output.mul_(3))
    small.step(3)


@method("set_post_optim_event")
def _(small: Small) -> None:
    small.step()
    small.model.set_post_optim_event(torch.cpu.Event())
    small.step()
    assert small.model._get_fsdp_state()._state_ctx.post_optim_event is None  # waited for, and let go


@method("set_reduce_scatter_divide_factor")
def _(small: Small) -> None:
    for part in (small.model, small.inner):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            part.set_reduce_scatter_divide_factor(1.0)
    small.step(WORLD)


@method("set_gradient_divide_factor")
def _(small: Small) -> None:
    for part in (small.model, small.inner):
        part.set_gradient_divide_factor(4.0)
    small.step(WORLD / 4)


@method("set_force_sum_reduction_for_comms")
def _(small: Small) -> None:
    small = Small(small.rank, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    small.inner.set_custom_reduce_scatter(own := Communication("DefaultReduceScatter"))
    small.step(tolerance=1e-6)
    for part in (small.model, small.inner):
        part.set_force_sum_reduction_for_comms(True)
    small.step(tolerance=1e-6)
    assert [call["op"] for call in own.calls] == [dist.ReduceOp.AVG, dist.ReduceOp.SUM]


@method("set_reduce_scatter_unused_params")
def _(small: Small) -> None:
    """A backward that sends nothing to p.grad reduces zeros, as in FSDP2 alone."""
    small.model.set_reduce_scatter_unused_params(True)
    small.step()
    norms = Small(small.rank, fxgrad.NormSample())
    for unused in (False, True):
        norms.model.zero_grad()
        norms.model.set_reduce_scatter_unused_params(unused)
        norms.forward().backward()
        grads = [p.grad for p in norms.model.parameters()]
        assert all(grad is not None and not grad.full_tensor().any() if unused else grad is None for grad in grads)


@method("set_reduce_scatter_max_input_buffers")
def _(small: Small) -> None:
    small.model.set_reduce_scatter_max_input_buffers(2)
    small.step()
    assert small.model._get_fsdp_state()._comm_ctx.reduce_scatter_max_input_buffers == 2


@method("set_separate_reduce_scatter_group")
def _(small: Small) -> None:
    small.model.set_separate_reduce_scatter_group()
    small.inner.set_custom_all_gather(gather := Communication("DefaultAllGather"))
    small.inner.set_custom_reduce_scatter(reduce := Communication("DefaultReduceScatter"))
    small.step()
    assert gather.calls[0]["group"] is not reduce.calls[0]["group"]


@method("set_allocate_memory_from_process_group_for_comm")
def _(small: Small) -> None:
    small.inner.set_allocate_memory_from_process_group_for_comm(True)
    with patch.object(collectives.ProcessGroupAllocAllGather, "__call__", autospec=True) as called:
        called.side_effect = lambda _, *args, **kwargs: collectives.DefaultAllGather()(*args, **kwargs)
        small.step()
    assert called.call_count == 1


@method("set_symm_mem_for_comm")
def _(small: Small) -> None:
    """Gloo has no symmetric memory: a stand-in for the all-gather that the method sets."""
    calls: list[str] = []

    class Symmetric(collectives.DefaultAllGather):
        def __init__(self, group: Any, backend: str) -> None:
            pass

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("gather")
            return super().__call__(*args, **kwargs)

    with patch.object(parameter_groups, "SymmMemAllGather", Symmetric):
        small.inner.set_symm_mem_for_comm()
    small.step()
    assert calls == ["gather"]
