"""More cases of tests/sharded_processes.py: what the processes add up, what a program saves, and FSDP2's methods."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fxgrad
from fxgrad.errors import AlreadySet, OptionError
from fxgrad.testing import per_sample_grads
from tests.sharded_processes import (
    SIZES,
    WORLD,
    assert_grads,
    case,
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
    for build in (lambda model: units(model), lambda model: units(model, reshard_after_forward=False)):
        model = tied()
        alone = copy.deepcopy(model)
        private = fxgrad.transform(build(model), quantity=[fxgrad.Grad(), *MOMENTS], backend="eager")
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
        model = tied(width=4)
        alone = copy.deepcopy(model)
        private = units(fxgrad.transform(model, quantity=MOMENTS, backend="aot_eager"), **options)
        batch = ids((0, 3))
        loss(private(batch[rank])).backward()
        assert_moments(private, alone, torch.cat(batch))
    model = tied().float()
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
    grouped = [fxgrad.SquaredGrad(), fxgrad.GradVariance(group_size=2)]
    batch, second = ids((2, 6)), ids((0, 4), seed=1)
    for policy in ("sum", "append", "overwrite"):
        model: Any = tied()
        alone = copy.deepcopy(model)
        seen: list[Any] = []
        private: Any = fxgrad.transform(
            model, quantity=grouped, backend="eager", accumulate=policy, on_result=partial(_keep, seen)
        )
        beside: Any = fxgrad.transform(alone, quantity=grouped, backend="eager", accumulate=policy)
        loss(private(torch.cat(batch))).backward()
        private.zero_grad()
        units(model)
        for x in (batch, second):
            for one in (private, beside):
                one.blocks[1].up.weight.requires_grad_(x is batch)
            loss(private(x[rank])).backward()
            loss(beside(torch.cat(x))).backward()
        for (name, p), q in zip(private.named_parameters(), beside.parameters(), strict=True):
            for place, quantity in zip(("squared_grad_sum", "grad_variance"), grouped, strict=True):
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
