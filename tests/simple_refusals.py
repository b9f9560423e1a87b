"""What fxgrad refuses of models with gathering properties: cases of tests/simple_processes.py, on both processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fxgrad
import fxgrad.opacus
from fxgrad.errors import OptionError, UnclippedGrad
from tests.sharded_processes import C, loss, refused
from tests.simple_models import Gather, Mlp, Transformer, divided, gathering
from tests.simple_processes import CASES, assert_grads, case, clipped_sums, clipping, made, mesh, rows

__all__ = ["CASES"]


def refused_call(part: str, model: nn.Module, x: Tensor | None = None) -> None:
    """Refused when the model is transformed or called; nothing has changed then."""
    kinds = [type(one) for one in model.modules()]
    refused(OptionError, part, lambda: clipping(model)(rows((2, 2))[0] if x is None else x))
    assert kinds == [type(one) for one in model.modules()]
    assert all(p.grad is None for p in model.parameters())


def made_by(gather: Callable[[Any], Any]) -> Any:
    return divided(made(Mlp), mesh(), gather=gather)


def local(shard: Any, *grad_placements: Any) -> Any:
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=grad_placements or None)


@case
def other_properties(rank: int) -> None:
    """What a property may do besides; most would run, and leave a wrong bound or another gradient."""

    class Scaled(Partial):
        pass

    @torch.no_grad()
    def written(shard: Any) -> Any:
        whole = local(shard, Partial("avg"))
        whole.data.mul_(0.5)
        return whole

    def hooked(shard: Any) -> Any:
        whole = local(shard, Partial("avg"))
        whole.register_hook(lambda g: 100 * g)
        return whole

    inactive = Gather()
    inactive.active = False
    first = distribute_tensor(torch.ones(2, 3), mesh(), [Shard(0)]).requires_grad_()
    cases: dict[str, list[Callable[[Any], Any]]] = {
        "something else than redistribute": [
            lambda shard: 2 * local(shard, Partial("avg")),
            lambda shard: local(shard / shard.norm(), Partial("avg")),
            lambda shard: F.dropout(local(shard, Partial("avg")), 0.5),
            lambda shard: local(shard.detach(), Partial("avg")),
            lambda shard: local(first, Partial("avg")),
            lambda shard: shard.to_local(),
            lambda shard: local(shard, Partial("avg")).detach().requires_grad_(),
            lambda shard: local(shard, Partial("avg")).to(torch.float32),
            written,
        ],
        "grad_placements=None": [local, lambda shard: shard.full_tensor()],
        "grad_placements=(": [
            lambda shard: local(shard, Partial("max")),
            lambda shard: local(shard, Scaled("sum")),
            lambda shard: local(shard, Replicate()),
            lambda shard: local(shard, Shard(0)),
        ],
        "not an ordinary tensor": [lambda shard: shard, inactive],
        "sets a hook": [hooked],
        "other values": [lambda shard: _halved(local(shard, Partial("avg")))],
    }
    for part, gathers in cases.items():
        for gather in gathers:
            refused_call(part, made_by(gather))


def _halved(whole: Tensor) -> Tensor:
    whole.data.mul_(0.5)
    return whole


@case
def other_modules(rank: int) -> None:
    """Every DTensor of the model has to be one that a property gathers."""
    bare = divided(made(Mlp), mesh())
    bare.norm.__class__ = nn.LayerNorm
    refused_call("'norm.weight' is a DTensor, and no property", bare)
    buffered = divided(made(Mlp), mesh())
    buffered.norm.register_buffer("mean", distribute_tensor(torch.ones(7), mesh(), [Replicate()]))
    refused_call("'norm.mean' is a DTensor, and no property", buffered)
    mixed = made(Mlp)
    divided(mixed.up, mesh())
    parallelize_module(mixed, mesh(), {"down": ColwiseParallel(output_layouts=Replicate())})
    refused_call("'down' is divided by tensor parallelism", mixed)
    tied = divided(made(Transformer), mesh())
    kind = tied.head.__class__ = nn.Linear
    assert kind is nn.Linear
    gathering(tied.head, ["weight"], Gather("sum"))
    private = clipping(tied)
    for _ in range(2):
        refused(OptionError, "two modules have it", partial(private, torch.zeros(2, 4, dtype=torch.long)))
    cached = divided(made(Mlp), mesh())

    class Reaching(type(cached.down)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name == "weight":
                return gathered
            return super().__getattribute__(name)

    gathered = cached.down.weight
    cached.down.__class__ = Reaching
    refused_call("something else than redistribute", cached)


@case
def hooks_and_wrappers(rank: int) -> None:
    model = divided(made(Mlp), mesh())
    batch = rows((2, 2))
    handle = model.up._parameters["weight"].register_hook(lambda g: g)
    refused_call("'up.weight' is a DTensor with a hook", model)
    handle.remove()
    handle = model.up._parameters["bias"].register_post_accumulate_grad_hook(lambda p: None)
    refused_call("'up.bias' is a DTensor with a hook", model)
    handle.remove()
    private = clipping(model)
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sums(made(Mlp), batch))


@case
def other_quantities(rank: int) -> None:
    x = rows((2, 2))[rank]
    for quantity, place in (
        (fxgrad.GradSample(), "grad_sample"),
        (fxgrad.SquaredGrad(), "squared_grad_sum"),
        (fxgrad.GradVariance(), "grad_variance"),
    ):
        private = fxgrad.transform(divided(made(Mlp), mesh()), quantity=quantity, backend="eager")
        refused(OptionError, f"{place} of a parameter belongs to the whole", partial(private, x))


@case
def other_functions(rank: int) -> None:
    said = "does not know models whose parameters a property gathers"
    checking = partial(fxgrad.transform, quantity=fxgrad.ClippedGrad(C), check_first_batch=True, backend="eager")
    x = rows((2, 2))[rank]
    model = divided(made(Mlp), mesh())
    private = clipping(model)
    for function in (fxgrad.explain, fxgrad.verify, fxgrad.trace):
        refused(OptionError, f"{function.__name__} {said}", partial(function, private, x))
    refused(OptionError, f"warm_up {said}", partial(fxgrad.warm_up, private, x))
    refused(OptionError, f"check_first_batch {said}", partial(checking, model))
    late = made(Mlp)
    early = checking(late)
    divided(late, mesh())
    refused(OptionError, "check_first_batch", partial(early, x))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in (model, private):
        make = partial(
            fxgrad.opacus.make_private,
            PrivacyEngine(),
            module=one,
            optimizer=optimizer,
            data_loader=data,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        refused(OptionError, f"make_private {said}", make)


@case
def gradients_before_the_first_call(rank: int) -> None:
    """The guard knows DTensors that came behind `transform`, before any call."""
    model = made(Mlp)
    private = clipping(model)
    divided(model, mesh())
    batch = rows((2, 2))
    refused(UnclippedGrad, "not clipped", lambda: loss(model(batch[rank])).backward())
    assert all(p.grad is None for p in model.parameters())
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sums(made(Mlp), batch))


@case
def two_views(rank: int) -> None:
    """The guards of the DTensors know what another view of the model delivers."""
    model = divided(made(Mlp), mesh())
    batch = rows((2, 2))
    first, second = clipping(model), clipping(model)
    for view in (first, second):  # one after the other
        loss(view(batch[rank])).backward()
    expected = clipped_sums(made(Mlp), batch)
    assert_grads(first, {name: 2 * g for name, g in expected.items()})
    first.zero_grad()
    both = lambda one, other: (loss(one(batch[rank])) + loss(other(batch[rank]))).backward()  # noqa: E731
    refused(UnclippedGrad, "two transformed models deliver it in one backward", partial(both, first, second))
    sums = fxgrad.transform(model, quantity=fxgrad.Grad(), backend="eager")
    refused(UnclippedGrad, "another transformed view of the model clips", lambda: loss(sums(batch[rank])).backward())
    assert all(p.grad is None for p in model.parameters())
    norms = fxgrad.transform(model, quantity=fxgrad.NormSample(), backend="eager")
    both(first, norms)
    assert_grads(first, expected)


@case
def replicas_around(rank: int) -> None:
    model = nn.Sequential(clipping(divided(made(Mlp), mesh())), nn.Linear(3, 3).double())
    x = rows((2, 2))[rank]
    model[0].requires_grad_(False)
    ignored = [f"0.{name}" for name, _ in model[0].named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    around = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    refused(OptionError, "around a model whose parameters a property gathers", partial(around, x))
