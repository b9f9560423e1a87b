"""The guard's bulk operations: one parameter among several that is not as the others are, in each way."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.api import engine_of
from fxgrad.errors import UnclippedGrad

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ODD = 2  # the parameter that is not as the others are

Prepare = Callable[[nn.Module, Tensor], Any]


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def parameters_of(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def private_of(model: nn.Sequential) -> nn.Sequential:
    return fxgrad.transform(model, quantity=fxgrad.ClippedGrad(0.5), backend="eager")


def clipped(model: nn.Module) -> list[Tensor]:
    """The clipped sum by the loop over single samples."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for x in X:
        grads = torch.autograd.grad(model(x[None]).sum(), list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for total, grad in zip(sums, grads, strict=True):
            total += grad * torch.clamp(0.5 / (norm + 1e-6), max=1.0)
    return sums


def as_it_is(model: nn.Module, odd: Tensor) -> None:
    pass


def has_grad(model: nn.Module, odd: Tensor) -> None:
    odd.grad = torch.zeros_like(odd)


def has_hook(model: nn.Module, odd: Tensor) -> None:
    odd.register_hook(lambda grad: None)


def is_transposed(model: nn.Module, odd: Tensor) -> None:
    odd.data = odd.data.t().contiguous().t()


def lost_its_hooks(model: nn.Module, odd: Tensor) -> None:
    assert odd._backward_hooks is not None
    odd._backward_hooks.clear()


def was_seen_in_a_backward_that_raised(model: nn.Module, odd: Tensor) -> None:
    with pytest.raises(UnclippedGrad, match="used outside of the transformed"):
        (model(X).sum() + odd.sum()).backward()


WAYS: list[Prepare] = [
    as_it_is,
    has_grad,
    has_hook,
    is_transposed,
    lost_its_hooks,
    was_seen_in_a_backward_that_raised,
]


@pytest.mark.parametrize("prepare", WAYS)
def test_deliveries_are_right_in_every_step(prepare: Prepare) -> None:
    model = layers()
    expected = clipped(copy.deepcopy(model))
    private = private_of(model)
    odd = list(model.parameters())[ODD]
    for step in range(3):
        if step == 1:
            prepare(private, odd)
        private(X).sum().backward()
        for parameter, total in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, total)
        private.zero_grad()


@pytest.mark.parametrize("prepare", WAYS)
def test_a_gradient_from_outside_is_refused_at_each_parameter(prepare: Prepare) -> None:
    model = layers()
    private = private_of(model)
    parameters = list(model.parameters())
    private(X).sum().backward()
    private.zero_grad()
    prepare(private, parameters[ODD])
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    for name, used in model.named_parameters():
        with pytest.raises(UnclippedGrad, match=f"'{name}'"):
            (private(X).sum() + used.square().sum()).backward()
        for parameter, grad in zip(parameters, before, strict=True):
            kept = parameter.grad
            assert kept is grad is None or (kept is not None and grad is not None and torch.equal(kept, grad))


def test_a_change_after_the_delivery_is_refused_at_each_parameter() -> None:
    model = layers()
    private = private_of(model)
    private(X).sum().backward()
    private.zero_grad()

    def add(changed: Tensor) -> None:
        assert changed.grad is not None
        changed.grad.add_(1)

    for name, parameter in model.named_parameters():
        handle = parameter.register_post_accumulate_grad_hook(add)
        with pytest.raises(UnclippedGrad, match=f"'{name}' was changed while it was delivered"):
            private(X).sum().backward()
        assert all(one.grad is None for one in model.parameters())
        handle.remove()
        private(X).sum().backward()
        private.zero_grad()


def test_some_parameters_of_a_backward_and_all_of_the_next() -> None:
    model = layers()
    expected = clipped(copy.deepcopy(model))
    private = private_of(model)
    parameters = list(model.parameters())
    private(X).sum().backward(inputs=parameters[:3])
    assert [p.grad is None for p in parameters] == [False] * 3 + [True] * 3
    private.zero_grad()
    private(X).sum().backward()
    for parameter, total in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, total)


def test_frozen_between_two_steps() -> None:
    model = layers()
    private = private_of(model)
    for frozen in (False, True, False):
        model[2].requires_grad_(not frozen)
        private(X).sum().backward()
        assert (parameters_of(model)[ODD].grad is None) == frozen
        private.zero_grad()
        with pytest.raises(UnclippedGrad, match=r"'4\.bias'"):
            (private(X).sum() + parameters_of(model)[5].sum()).backward()


def test_replaced_parameters_are_not_kept() -> None:
    """The first may be: what compiled the graph has it."""
    model = layers()
    private = private_of(model)
    engine = engine_of(private)
    assert engine is not None and engine.store.guard is not None
    watched: list[int] = []
    for _ in range(3):
        private(X).sum().backward()
        private.zero_grad()
        model[2].weight = nn.Parameter(parameters_of(model)[ODD].detach().clone())
        gc.collect()
        private(X).sum().backward()
        private.zero_grad()
        watched.append(len(engine.store.guard.watched))
    assert watched[1] == watched[2]
    with pytest.raises(UnclippedGrad, match=r"'2\.weight'"):
        (private(X).sum() + parameters_of(model)[ODD].sum()).backward()
