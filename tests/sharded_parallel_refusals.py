"""What is refused where FSDP2 and tensor parallelism meet: cases of tests/sharded_parallel.py, on four processes."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxgrad
from fxgrad.errors import FxgradError, OptionError, UnclippedGrad
from fxgrad.host.fsdp import local_part
from tests.parallel_processes import Mlp, made, values
from tests.parallel_refusals import Styled, prepare
from tests.sharded_parallel import CASES, batches, case, divided_mlp, grid, pair, units
from tests.sharded_processes import C, loss, refused

__all__ = ["CASES"]

PLAN: Any = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}


class Normed(nn.Module):
    """A parallel Mlp behind a layer that no style divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


def normed() -> Any:
    return parallelize_module(made(Normed), grid(2, 2)["tp"], PLAN)


def refused_call(part: str, model: nn.Module, x: Tensor | None = None) -> None:
    x = values(4, 6) if x is None else x
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    for _ in range(2):  # the first refusal changes nothing
        refused(OptionError, part, lambda: private(x))


@case
def units_over_other_processes(rank: int) -> None:
    mesh = grid(2, 2)
    flat = mesh["dp", "tp"]._flatten("all")
    for other in (mesh["tp"], flat):
        model = normed()
        fully_shard(model.norm, mesh=other)
        fully_shard(model, mesh=mesh["dp"])
        refused_call("different dimensions of one mesh", model)
        model = normed()
        refused(Exception, "overlap", lambda: fully_shard(model.mlp, mesh=other))  # noqa: B023 - PyTorch's own
    model = normed()
    for part in (model.norm, model.mlp):
        fully_shard(part, mesh=mesh["tp"] if part is model.norm else mesh["dp"])
    refused_call("different dimensions of one mesh", model)


@case
def parameters_in_no_unit(rank: int) -> None:
    mesh = grid(2, 2)
    for blocks in (["norm"], ["mlp"], ["mlp.up", "norm"]):
        model = normed()
        for name in blocks:
            fully_shard(model.get_submodule(name), mesh=mesh["dp"])
        refused_call("is in no unit", model)
    model = normed()
    fully_shard(model, mesh=mesh["dp"], ignored_params={model.norm.weight})
    refused_call("'norm.weight' of a tensor-parallel model is in no unit", model)


@case
def divided_behind_fully_shard(rank: int) -> None:
    mesh = grid(2, 2)
    plans: list[tuple[str, Any]] = [("mesh", PLAN), ("DTensor", {"norm": SequenceParallel(use_local_output=True)})]
    for part, plan in plans:  # refused by PyTorch
        model = units(made(Normed), mesh)
        refused(Exception, part, partial(parallelize_module, model, mesh["tp"], plan))


@case
def other_inputs(rank: int) -> None:
    """Both groups raise, although one of them has equal inputs."""
    private, _ = pair(fxgrad.ClippedGrad(C))
    refused(OptionError, "different inputs", lambda: private(values(4, 6, seed=min(rank, 1))))
    loss(private(values(4, 6))).backward()


@case
def by_name(rank: int) -> None:
    def refuse(part: str, model: nn.Module, **options: Any) -> None:
        known: dict[str, Any] = {"quantity": fxgrad.ClippedGrad(C), "backend": "eager", **options}
        refused(OptionError, part, lambda: fxgrad.transform(model, **known))

    mesh = grid(2, 2)
    model = divided_mlp(mesh)(made(Mlp))
    refuse("GradSample", model, quantity=fxgrad.GradSample())
    refuse("SquaredGrad", model, quantity=[fxgrad.ClippedGrad(C), fxgrad.SquaredGrad()])
    refuse("GradVariance", model, quantity=fxgrad.GradVariance())
    refuse("check_first_batch", model, check_first_batch=True)
    refuse("mixing", model, quantity=fxgrad.Grad(), mixing="allow")
    refuse("fullgraph=False", model, quantity=fxgrad.Grad(), fullgraph=False)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    for ask in (fxgrad.explain, fxgrad.verify, fxgrad.warm_up, fxgrad.trace):
        refused(FxgradError, ask.__name__, partial(ask, private, values(4, 6)))
    styled = parallelize_module(normed(), mesh["tp"], {"mlp": Styled()})
    refused_call("this style is not supported", units(styled, mesh))
    offloaded = divided_mlp(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))(made(Mlp))
    refused_call("offload", offloaded)


@case
def tied_to_another_style(rank: int) -> None:
    mesh = grid(2, 2)
    plan: Any = {"norm": SequenceParallel(use_local_output=True), **PLAN}
    model: Any = parallelize_module(made(Normed), mesh["tp"], plan)
    model.mlp.down.bias = model.norm.bias
    refused_call("tied to a parameter of a SequenceParallel layer", units(model, mesh), values(4, 6, 6))
    model = parallelize_module(made(Normed), mesh["tp"], PLAN)
    model.mlp.up.weight = nn.Parameter(model.mlp.up.weight.redistribute(placements=[Shard(1)]))
    refused_call("not as the style places it", units(model, mesh))
    model = normed()
    model.mlp.up.weight = nn.Parameter(torch.ones(12, 6, dtype=torch.double))
    refused_call("does not lie on the mesh of the style alone", units(model, mesh))


@case
def guarded(rank: int) -> None:
    """What the original model adds to p.grad is not clipped."""
    model = divided_mlp(grid(2, 2))(made(Mlp))
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    x = batches()[rank // 2]
    loss(private(x)).backward()
    grads = [local_part(p.grad).clone() for p in private.parameters()]
    refused(UnclippedGrad, "not clipped", lambda: loss(model(x)).backward())
    model.reset_iter_state()
    for p, grad in zip(private.parameters(), grads, strict=True):
        assert torch.equal(local_part(p.grad), grad)
    other = divided_mlp(grid(2, 2))(made(Mlp))
    loss(other(x)).backward()
    refused_call_with_grads = fxgrad.transform(other, quantity=fxgrad.ClippedGrad(C), backend="eager")
    refused(UnclippedGrad, "from before the first transformed call", lambda: refused_call_with_grads(x))


@case
def changed_between(rank: int) -> None:
    private, _ = pair(fxgrad.ClippedGrad(C))
    y = private(batches()[rank // 2])
    with torch.no_grad():
        for unit in (private, private.up):
            unit.reshard()
        for p in private.parameters():
            p.mul_(2)
    refused(OptionError, "changed between a forward and its backward", lambda: loss(y).backward())


@case
def around(rank: int) -> None:
    private, _ = pair(fxgrad.ClippedGrad(C))
    with mock.patch("fxgrad.capture.parallel.wrapped_by_ddp", lambda: private):
        refused(OptionError, "around a tensor-parallel", lambda: private(values(4, 6)))


@case
def private_training(rank: int) -> None:
    said = "make_private does not know tensor-parallel models"
    refused(OptionError, said, lambda: prepare(divided_mlp(grid(2, 2))(made(Mlp))))
    transformed, _ = pair(fxgrad.ClippedGrad(1.0))
    refused(OptionError, said, lambda: prepare(transformed))
