"""Steps that are one graph run it without AOTAutograd's wrappers, where those do nothing, and with them elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.compile import transformed, unwrapped
from fxgrad.compile.transformed import WholeStep

pytestmark = pytest.mark.inductor

Step = Callable[..., Any]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[WholeStep]:
    """The compiled steps that have been called."""
    called: list[WholeStep] = []
    call = WholeStep.__call__

    def noted(self: WholeStep, *args: Any) -> Any:
        called.append(self)
        return call(self, *args)

    monkeypatch.setattr(WholeStep, "__call__", noted)
    return called


def squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def made(model: nn.Module, loss_fn: Step = squares, backend: str = "inductor") -> tuple[nn.Module, Step]:
    torch._dynamo.reset()
    private = fxgrad.transform(model, fxgrad.ClippedGrad(1.0), backend=backend)
    return private, fxgrad.forward_backward(private, loss_fn)


def is_unwrapped(step: WholeStep) -> bool:
    return not step.detached


def taken(private: nn.Module, step: Step, x: Tensor) -> tuple[Any, list[Tensor]]:
    """What a step returns, and its gradients."""
    fxgrad.zero_grad(private)
    returned = step(x)
    grads = [parameter.grad for parameter in private.parameters() if parameter.grad is not None]
    assert grads and not any(grad.requires_grad for grad in grads)
    return returned, grads


def test_the_second_call_gives_what_the_first_gave(steps: list[WholeStep]) -> None:
    private, step = made(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = torch.randn(6, 4)
    loss, grads = taken(private, step, x)
    again, as_well = taken(private, step, x)
    assert is_unwrapped(steps[-1]) and steps[0] is steps[1]
    assert torch.is_grad_enabled() and not again.requires_grad
    assert loss.equal(again) and all(map(Tensor.equal, grads, as_well))


def test_other_sizes_and_changed_parameters_are_seen(steps: list[WholeStep]) -> None:
    private, step = made(nn.Linear(4, 3))
    for size in (6, 3, 9):
        x = torch.randn(size, 4)
        _, grads = taken(private, step, x)
        loop = fxgrad.transform(nn.Linear(4, 3), fxgrad.ClippedGrad(1.0), backend="eager")
        loop.load_state_dict(private.state_dict())
        squares(loop, x).backward()
        torch.testing.assert_close(grads, [parameter.grad for parameter in loop.parameters()])
        with torch.no_grad():
            for parameter in private.parameters():
                parameter.sub_(0.1 * torch.ones_like(parameter))
    assert is_unwrapped(steps[-1]) and len({*map(id, steps)}) == 1


def test_without_gradients_switched_on(steps: list[WholeStep]) -> None:
    private, step = made(nn.Linear(4, 3))
    x = torch.randn(6, 4)
    _, grads = taken(private, step, x)
    with torch.no_grad():
        _, as_well = taken(private, step, x)
        assert not torch.is_grad_enabled()
    assert is_unwrapped(steps[-1]) and all(map(Tensor.equal, grads, as_well))


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y: Tensor = self.layer(x)
        return y


def test_what_writes_to_a_buffer_keeps_its_wrappers(steps: list[WholeStep]) -> None:
    """They count versions, by which autograd notices the write."""
    model = Counts()
    private, step = made(model)
    for calls in range(1, 4):
        version = model.calls._version
        taken(private, step, torch.randn(6, 4))
        assert model.calls == calls and model.calls._version > version
    assert not is_unwrapped(steps[-1])


@pytest.mark.parametrize("other", [lambda m, x: x[1:], lambda m, x: m.weight.detach()])
def test_what_returns_an_argument_keeps_its_wrappers(steps: list[WholeStep], other: Step) -> None:
    """They make views of the arguments."""
    private, step = made(nn.Linear(4, 3), lambda model, x: (squares(model, x), other(model, x)))
    for _ in range(3):
        x = torch.randn(6, 4)
        (_, returned), _ = taken(private, step, x)
        expected = other(private, x)
        assert returned.equal(expected) and not returned.requires_grad
        assert returned.data_ptr() == expected.data_ptr()
    assert not is_unwrapped(steps[-1])


def test_under_autocast_wrappers_stay(steps: list[WholeStep]) -> None:
    """They switch it off around a graph that has its casts already."""
    private, step = made(nn.Linear(4, 3))
    x = torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        _, grads = taken(private, step, x)
        _, as_well = taken(private, step, x)
    assert not is_unwrapped(steps[-1]) and all(map(Tensor.equal, grads, as_well))
    taken(private, step, x)
    assert steps[-1] is not steps[0] and is_unwrapped(steps[-1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_are_called_as_they_were(steps: list[WholeStep], backend: str) -> None:
    private, step = made(nn.Linear(4, 3), backend=backend)
    _, grads = taken(private, step, torch.ones(6, 4))
    _, as_well = taken(private, step, torch.ones(6, 4))
    assert not is_unwrapped(steps[-1]) and all(map(Tensor.equal, grads, as_well))


def test_random_numbers_go_on(steps: list[WholeStep]) -> None:
    _, step = made(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    x = torch.randn(60, 4)
    torch.manual_seed(0)
    first = [step(x).item() for _ in range(3)]
    torch.manual_seed(0)
    assert [step(x).item() for _ in range(3)] == first and len(set(first)) == 3
    assert is_unwrapped(steps[-1])


def test_another_threads_graphs_are_not_taken_for_ours(steps: list[WholeStep], monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.compile(lambda x: x * 2)
    other(torch.ones(3))
    see = unwrapped.called_to_see

    def beside(compiled: Step, inputs: list[Any]) -> Any:
        def call(*given: Any) -> Any:
            thread = threading.Thread(target=other, args=(torch.ones(3),))
            thread.start()
            thread.join()
            return compiled(*given)

        return see(call, inputs)

    monkeypatch.setattr(transformed, "called_to_see", beside)
    private = fxgrad.transform(nn.Linear(4, 3), fxgrad.ClippedGrad(1.0))
    step = fxgrad.forward_backward(private, squares)
    _, grads = taken(private, step, torch.ones(6, 4))
    _, as_well = taken(private, step, torch.ones(6, 4))
    assert is_unwrapped(steps[-1]) and all(map(Tensor.equal, grads, as_well))


def test_a_step_that_raises_leaves_gradients_switched_on(steps: list[WholeStep]) -> None:
    private, step = made(nn.Embedding(5, 3))
    taken(private, step, torch.tensor([0, 1, 4]))
    with pytest.raises((IndexError, RuntimeError), match="index out of"):
        step(torch.tensor([0, 1, 7]))
    assert torch.is_grad_enabled() and is_unwrapped(steps[-1])
