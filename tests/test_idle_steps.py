"""An optimizer that finds grad_sample and no p.grad moves nothing: one warning in a process says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.optim import optimizer as of_torch

import fxgrad
from fxgrad.runtime import idle_steps

MESSAGE = r"SGD.step\(\) moved nothing: p.grad of its parameters is None, and p.grad_sample is set"

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process() -> Iterator[None]:
    idle_steps.forget()
    yield
    idle_steps.forget()


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def delivered(model: nn.Module, quantity: Any = None) -> Any:
    gs = fxgrad.transform(model, quantity=quantity, backend="eager", accumulate="overwrite")
    gs(torch.ones(5, 3)).sum().backward()
    return gs


def caught(optimizer: torch.optim.Optimizer, closure: Any = None) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step(closure)
    return [str(one.message) for one in seen]


def hooks() -> int:
    return len(of_torch._global_optimizer_pre_hooks) + len(of_torch._global_optimizer_post_hooks)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(
    "quantity, place",
    [(fxgrad.GradSample(), "grad_sample"), (NORMS := fxgrad.NormSample(), "norm_sample"), ([NORMS], "norm_sample")],
    ids=str,
)
def test_it_warns_once(kind: Any, quantity: Any, place: str) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    delivered(model, quantity)
    [message] = caught(optimizer)
    assert message.startswith(f"{kind.__name__}.step() moved nothing: p.grad of its parameters is None, and p.{place}")
    assert "fxgrad.Grad()" in message and "fxgrad.ClippedGrad" in message
    assert torch.equal(model.weight, net().weight)
    assert not caught(optimizer)
    assert hooks() == 0
    delivered(model, quantity)
    assert not caught(kind(model.parameters(), lr=0.1)) and hooks() == 0


def test_the_line_is_the_users() -> None:
    model = net()
    delivered(model)
    with pytest.warns(UserWarning, match=MESSAGE) as seen:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert seen[0].filename == __file__


def test_what_it_advises_works() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for quantity in ([fxgrad.Grad(), fxgrad.GradSample()], fxgrad.ClippedGrad(1.0)):
        fxgrad.zero_grad(model)
        before = model.weight.detach().clone()
        delivered(model, quantity)
        assert not caught(optimizer)
        assert not torch.equal(model.weight, before)


def test_p_grad_filled_by_hand() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    delivered(model)
    for p in model.parameters():
        p.grad = p.grad_sample.sum(0)  # type: ignore[attr-defined]
    assert not caught(optimizer)


def test_one_parameter_with_a_gradient_is_enough() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    delivered(model)
    model.bias.grad = torch.ones(2)
    assert not caught(optimizer)


def test_another_models_optimizer() -> None:
    delivered(net())
    assert not caught(torch.optim.SGD(net().parameters(), lr=0.1))


def test_after_zero_grad() -> None:
    model = net()
    delivered(model).zero_grad()
    assert not caught(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_backward_in_a_closure() -> None:
    model = net()
    gs = fxgrad.transform(model, backend="eager")

    def closure() -> Tensor:
        gs.zero_grad()
        loss: Tensor = gs(torch.ones(5, 3)).sum()
        loss.backward()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    caught(optimizer, closure)  # the first delivery, from which on steps are looked at, is made in it
    assert len(caught(optimizer, closure)) == 1


class Signs(torch.optim.Optimizer):
    """An optimizer that reads grad_sample itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad_sample.sum(0).sign())


def test_an_optimizer_that_reads_grad_sample() -> None:
    model = net()
    delivered(model)
    assert not caught(Signs(model.parameters()))


def test_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer fills p.grad and then steps the one that it wraps; a virtual step of a part of a batch does not."""
    model = net()

    def private() -> DPOptimizer:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=5)

    optimizer = private()
    for part in (True, False):
        delivered(model)
        optimizer.signal_skip_step(do_skip=part)
        assert not caught(optimizer)
    assert not torch.equal(model.weight, net().weight)
    # A copy of an optimizer wraps the step of its class in the hooks of all optimizers.
    monkeypatch.setattr(DPOptimizer, "step", torch.optim.Optimizer.profile_hook_step(DPOptimizer.step))
    optimizer = private()
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}
    optimizer._optimizer_step_code = lambda: None
    for part in (True, False):
        delivered(model)
        optimizer.signal_skip_step(do_skip=part)
        assert not caught(optimizer)


def test_hooks_only_where_p_grad_stays_empty() -> None:
    delivered(net(), fxgrad.ClippedGrad(1.0))
    delivered(net(), [fxgrad.Grad(), fxgrad.NormSample()])
    delivered(net(), fxgrad.GradDot({name: torch.ones_like(p) for name, p in net().named_parameters()}))
    assert hooks() == 0
    delivered(net())
    delivered(net(), fxgrad.NormSample())
    assert hooks() == 2


class Counted(nn.Parameter):
    """Counts how often its gradient is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("grad", "grad_sample", "_version"):
            Counted.looks += 1
        return super().__getattribute__(name)


def test_it_looks_at_one_parameter_where_there_is_a_gradient() -> None:
    model = nn.Sequential(*[net() for _ in range(10)])
    delivered(net())
    parameters = [Counted(p.detach().clone()) for p in model.parameters()]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = Signs(parameters)
    optimizer.step = torch.optim.Optimizer.profile_hook_step(lambda self: None).__get__(optimizer)  # type: ignore[method-assign]
    Counted.looks = 0
    optimizer.step()
    assert Counted.looks == 1


def test_a_compiled_step() -> None:
    """Dynamo follows the hooks, too: no graph is added, and nothing is wrong."""
    model, graphs = net(), []

    def counted(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm

    def steps() -> int:
        graphs.clear()
        model.load_state_dict(net().state_dict())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch._dynamo.reset()
        assert not caught(optimizer)
        torch.compile(lambda: optimizer.step(), backend=counted)()
        torch.testing.assert_close(model.weight, net().weight - 0.2)
        return len(graphs)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    without = steps()
    delivered(net())
    assert hooks() == 2
    assert steps() == without > 0
