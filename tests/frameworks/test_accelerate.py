"""Accelerate: both orders of prepare and transform, mixed precision, and gradient accumulation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
import fxgrad.opacus
from fxgrad.errors import OptionError
from fxgrad.testing import relative_error
from tests.frameworks.loop import clipped_sum, loop_rows, norms_of

B = 6


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate's settings are the process's: no test sees another's."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, 4), torch.randint(3, (B,))


def loop_norms(x: Tensor, y: Tensor) -> Tensor:
    return norms_of(loop_rows(net(), x, y)).float()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_both_orders(precision: str) -> None:
    """The wrapper around forward is part of the graph either way, and what it returns is float32."""
    x, y = batch()
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    grads = []
    for order in ("transform first", "prepare first"):
        model = net()
        if order == "transform first":
            view = accelerator.prepare(fxgrad.transform(model, backend="eager"))
        else:
            view = fxgrad.transform(accelerator.prepare(model), backend="eager")
        outputs = view(x)
        assert outputs.dtype is torch.float32
        accelerator.backward(F.cross_entropy(outputs, y, reduction="sum"))
        grads.append({name: p.grad_sample for name, p in model.named_parameters()})  # type: ignore[attr-defined]
    assert relative_error(*grads) == 0
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        view = fxgrad.transform(net(), backend="eager")
        logits = view(x)
    F.cross_entropy(logits.float(), y, reduction="sum").backward()
    expected = {name: p.grad_sample for name, p in view.named_parameters()}  # type: ignore[attr-defined]
    assert relative_error(grads[0], expected) == 0


@pytest.mark.parametrize("what", ["the view", "the model"])
def test_copies_after_prepare_are_refused(what: str) -> None:
    """Under mixed precision Accelerate leaves a wrapper of the view's forward in the model's attributes."""
    model = net()
    view = Accelerator(mixed_precision="bf16", cpu=True).prepare(fxgrad.transform(model, backend="eager"))
    with pytest.raises(OptionError, match="cannot be copied while the model refers to it") as caught:
        copy.deepcopy(view if what == "the view" else model)
    assert "AveragedModel(model) of the original" in caught.value.advice


def test_forward_of_a_prepared_view() -> None:
    """``view.forward`` is Accelerate's wrapper around the transformed forward."""
    x, y = batch()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model, norms = net(), fxgrad.NormSample()
    view = accelerator.prepare(fxgrad.transform(model, quantity=norms, backend="eager"))
    F.cross_entropy(view.forward(x), y, reduction="sum").backward()
    expected = loop_norms(x, y)
    torch.testing.assert_close(fxgrad.result(view, norms), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(0.5), fxgrad.NormSample()], ids=str)
def test_accumulate_divides_the_loss(quantity: Any) -> None:
    x, y = batch()
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    view = accelerator.prepare(fxgrad.transform(net(), quantity=quantity, backend="eager"))
    with accelerator.accumulate(view):
        loss = F.cross_entropy(view(x), y, reduction="sum")
        with pytest.raises(OptionError, match="Accelerate divided the loss by 4 for gradient accumulation") as raised:
            accelerator.backward(loss)
        assert "accelerator.backward(loss * accelerator.gradient_accumulation_steps)" in str(raised.value)
        assert all(p.grad is None for p in view.parameters())
        accelerator.backward(F.cross_entropy(view(x), y, reduction="sum") * accelerator.gradient_accumulation_steps)
    result = fxgrad.result(view, quantity)
    norms = result.norm_sample if isinstance(result, fxgrad.Clipping) else result
    torch.testing.assert_close(norms, loop_norms(x, y))


def test_accumulation_over_batches() -> None:
    """Four batches, clipped sample by sample in a loop, and the optimizer steps once."""
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = net()
    view = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(0.5), backend="eager")
    view, optimizer = accelerator.prepare(view, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(2)
    x, y = torch.randn(4 * B, 4), torch.randint(3, (4 * B,))
    for some_x, some_y in zip(x.split(B), y.split(B), strict=True):
        with accelerator.accumulate(view):
            loss = F.cross_entropy(view(some_x), some_y, reduction="sum")
            accelerator.backward(loss * accelerator.gradient_accumulation_steps)
            optimizer.step()
            if not accelerator.sync_gradients:
                held = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
    start = net()
    assert all(torch.equal(p, held[name]) for name, p in start.named_parameters())
    for name, total in clipped_sum(loop_rows(start, x, y), 0.5).items():
        expected = start.get_parameter(name).double() - 0.1 * total
        torch.testing.assert_close(model.get_parameter(name).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "quantity", [fxgrad.Grad(), fxgrad.GradSample(), [fxgrad.Grad(), fxgrad.NormSample()]], ids=str
)
def test_what_follows_the_loss_is_not_refused(quantity: Any) -> None:
    """Gradients of the loss that backward was called on: divided, as p.grad is without fxgrad."""
    x, y = batch()
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    view = accelerator.prepare(fxgrad.transform(net(), quantity=quantity, backend="eager"))
    accelerator.backward(F.cross_entropy(view(x), y, reduction="sum"))


def test_a_division_of_the_users_own() -> None:
    x, y = batch()
    quantity = fxgrad.NormSample()
    view = fxgrad.transform(net(), quantity=quantity, loss_reduction=4, backend="eager")
    (F.cross_entropy(view(x), y, reduction="sum") / 4).backward()
    torch.testing.assert_close(fxgrad.result(view, quantity), loop_norms(x, y))


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_prepared_optimizer_is_refused(wrapped: bool) -> None:
    """Accelerate's wrapper takes no hooks; torch's optimizer inside of it does."""
    model, x, y = net(), *batch()
    model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def private() -> Any:
        return fxgrad.opacus.make_private(
            PrivacyEngine(),
            module=model,
            optimizer=optimizer if wrapped else optimizer.optimizer,
            data_loader=DataLoader(TensorDataset(x, y), 3),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            backend="eager",
        )

    if not wrapped:
        assert private()[1].original_optimizer is optimizer.optimizer
        return
    with pytest.raises(OptionError, match="AcceleratedOptimizer'>, which takes no hooks") as caught:
        private()
    assert "optimizer=optimizer.optimizer" in caught.value.advice
