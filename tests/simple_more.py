"""More of what a training loop does with SimpleFSDP's models: cases of tests/simple_processes.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fxgrad
from tests.sharded_processes import WORLD, C, loss
from tests.simple_models import Gather, Mlp, divided
from tests.simple_processes import CASES, assert_grads, case, clipped_sums, clipping, made, mesh, rows, whole

__all__ = ["CASES"]


def sums(**options: Any) -> Any:
    return fxgrad.transform(divided(made(Mlp), mesh()), quantity=fxgrad.Grad(), backend="eager", **options)


@case
def a_class_with_more_in_it(rank: int) -> None:
    """A class of the user's with a property and a forward; an ordinary parameter beside is nobody else's."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.linear(x, self.weight, self.bias)

    class Gathered(Doubled):
        weight = property(lambda self: Gather()(self._parameters["weight"]))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, 2 * self.weight, 2 * self.bias)

    model = made(Mlp)
    model.up.__class__ = Doubled
    other: Any = copy.deepcopy(model)
    other.up.weight = nn.Parameter(distribute_tensor(other.up.weight.detach(), mesh(), [Shard(0)]))
    other.up.__class__ = Gathered
    private = clipping(other, "aot_eager")
    batch = rows((2, 3))
    loss(private(batch[rank])).backward()
    own = clipped_sums(model, [batch[rank]], 1)
    for name, p in private.named_parameters():
        if name == "up.weight":
            torch.testing.assert_close(whole(p.grad), clipped_sums(model, batch)[name])
        else:
            torch.testing.assert_close(p.grad, own[name])
    assert type(other.up) is Gathered


@case
def reentrant_checkpoints_around(rank: int) -> None:
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh()))
    for sizes in ((2, 3), (0, 3)):
        batch = rows(sizes)
        private.zero_grad()
        loss(checkpoint(private, batch[rank].clone().requires_grad_(), use_reentrant=True)).backward()
        assert_grads(private, clipped_sums(model, batch))


@case
def several_forwards_and_graphs(rank: int) -> None:
    """Grad adds up over forwards of one backward, and over graphs."""

    class Broken(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            torch._dynamo.graph_break()
            return self.down(self.norm(x))

    plain = divided(made(Broken), mesh())
    summed = fxgrad.transform(divided(made(Broken), mesh()), quantity=fxgrad.Grad(), backend="eager", fullgraph=False)
    batches = rows((2, 3)), rows((1, 4), seed=2)
    for model in (plain, summed):
        (loss(model(batches[0][rank])) + loss(model(batches[1][rank]))).backward()
    assert_grads(summed, {name: whole(p.grad) for name, p in plain.named_parameters()})


@case
def loaded_copied_and_cast(rank: int) -> None:
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh()))
    batch = rows((2, 3))
    copied = copy.deepcopy(private)
    doubled = {name: 2 * value for name, value in model.state_dict().items()}
    for assign in (False, True):
        state = {name: distribute_tensor(value, mesh(), [Shard(0)]) for name, value in doubled.items()}
        private.load_state_dict(state, assign=assign)
        private.zero_grad()
        loss(private(batch[rank])).backward()
        larger = copy.deepcopy(model)
        larger.load_state_dict(doubled)
        assert_grads(private, clipped_sums(larger, batch))
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        copied.to(dtype).zero_grad()
        loss(copied(batch[rank].to(dtype))).backward()
        assert_grads(copied, clipped_sums(model, batch), tolerance)


@case
def other_results(rank: int) -> None:
    model = made(Mlp)
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for value in gradient.values():
        dist.broadcast(value, 0)
    quantities = [fxgrad.GradDot(gradient), fxgrad.GradGram(), fxgrad.GradProjection(4, seed=1)]
    batch = rows((2, 3))
    ours = fxgrad.transform(divided(copy.deepcopy(model), mesh()), quantity=quantities, backend="eager")
    alone = fxgrad.transform(copy.deepcopy(model), quantity=quantities, backend="eager")
    for one in (ours, alone):
        loss(one(batch[rank])).backward()
    for quantity in quantities:
        torch.testing.assert_close(fxgrad.result(ours, quantity), fxgrad.result(alone, quantity))
    whole, gram = fxgrad.transform(copy.deepcopy(model), quantity=fxgrad.GradGram(), backend="eager"), fxgrad.GradGram()
    loss(whole(torch.cat(batch))).backward()
    of_all = fxgrad.GradGram(all_processes=True)
    ours = fxgrad.transform(divided(copy.deepcopy(model), mesh()), quantity=of_all, backend="eager")
    loss(ours(batch[rank])).backward()
    torch.testing.assert_close(fxgrad.result(ours, of_all), fxgrad.result(whole, gram).split([2, 3])[rank])
    clipped = fxgrad.ClippedGrad(C, groups="per_parameter", sample_weight=True)
    ours = fxgrad.transform(divided(copy.deepcopy(model), mesh()), quantity=clipped, backend="eager")
    alone = fxgrad.transform(copy.deepcopy(model), quantity=clipped, backend="eager")
    weights = torch.rand(5, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    loss(ours(batch[rank], sample_weight=weights.split([2, 3])[rank])).backward()
    loss(alone(torch.cat(batch), sample_weight=weights)).backward()
    assert_grads(ours, {name: p.grad / WORLD for name, p in alone.named_parameters()})


@case
def reported_when_reduced(rank: int) -> None:
    reports: list[Any] = []
    summed = sums(on_result=lambda quantity, result: reports.append(result))
    loss(summed(rows((2, 3))[rank])).backward()
    (report,) = reports
    assert all(report[name] is p.grad is not None for name, p in summed.named_parameters())


@case
def errors_between_steps(rank: int) -> None:
    """Of a backward that raised nothing is left; the modules are as they were."""
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh()))
    kinds, batch = [type(part) for part in private.modules()], rows((2, 3))

    def raises(grad: Tensor) -> None:
        raise ZeroDivisionError

    outputs = private(batch[rank])
    outputs.register_hook(raises)
    for fails, error in (
        (lambda: loss(outputs).backward(), ZeroDivisionError),
        (lambda: private(torch.zeros(2, 9, dtype=torch.double)), RuntimeError),
    ):
        try:
            fails()
        except error:
            continue
        raise AssertionError("accepted")
    assert kinds == [type(part) for part in private.modules()]
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sums(model, batch))
