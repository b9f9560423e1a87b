"""Where PyTorch is told not to compile, or to compile the backward itself: refused, as nothing would be per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxgrad
from fxgrad.errors import FxgradError, OptionError, OutsideGraph

# Dynamo looks at its inputs' .grad, and turns warnings that are errors into crashes.
pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(5, 3)
NOT_CAPTURED = "TorchDynamo did not capture the model, so its parameters get ordinary gradients: weight, bias"


def view_of(model: nn.Module, quantity: Any = None) -> nn.Module:
    quantity = quantity or fxgrad.GradSample()
    return fxgrad.transform(model, quantity=quantity, backend="aot_eager", accumulate="overwrite")


@pytest.mark.parametrize("stance", ["force_eager", "eager_then_compile"])
def test_a_stance_in_the_first_call(stance: str) -> None:
    model = nn.Linear(3, 2)
    view = view_of(model)
    with torch.compiler.set_stance(stance), pytest.raises(OutsideGraph, match=NOT_CAPTURED):
        view(X)
    view(X).sum().backward()
    assert fxgrad.delivered(model.weight).shape == (5, 2, 3)


def test_a_stance_for_a_new_graph() -> None:
    """The rows of the step before do not stay for those of this one."""
    view = view_of(nn.Linear(3, 2))
    view(X).sum().backward()
    with torch.compiler.set_stance("eager_on_recompile"), pytest.raises(OutsideGraph, match=NOT_CAPTURED):
        view(X[:1])


def test_dynamo_disabled_for_one_call() -> None:
    """Dynamo skips the function from then on; later calls have another one."""
    model = nn.Linear(3, 2)
    view = view_of(model)
    with torch._dynamo.config.patch(disable=True):
        with pytest.raises(OutsideGraph, match=NOT_CAPTURED):
            view(X)
        with pytest.raises(FxgradError, match=f"{NOT_CAPTURED}|the model has no graph"):  # before torch 2.13
            fxgrad.trace(nn.Linear(3, 2), X)
    view(X).sum().backward()
    assert fxgrad.delivered(model.weight).shape == (5, 2, 3)


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("mode", [Seeing, lambda: FlopCounterMode(display=False)], ids=["own", "flops"])
def test_modes_that_see_each_op(mode: Any, fullgraph: bool, before: bool) -> None:
    """Refused, whether the graph is there or not; the model works outside of the mode."""
    model = nn.Linear(3, 2)
    view = fxgrad.transform(model, fullgraph=fullgraph, backend="aot_eager", accumulate="overwrite")
    if before:
        view(X).sum().backward()
    for run in (view, lambda x: fxgrad.explain(view, x)):
        with mode(), pytest.raises(OutsideGraph, match=r"inside of a .*, a TorchDispatchMode") as caught:
            run(X)
        assert "outside of that" in caught.value.advice
    view(X).sum().backward()
    assert fxgrad.delivered(model.weight).shape == (5, 2, 3)
    with torch.no_grad(), mode():
        view.eval()(X[:0])


def test_what_needs_no_gradient_runs_anywhere() -> None:
    model = nn.Linear(3, 2)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        assert view_of(model)(X).equal(model(X))


@pytest.mark.parametrize("size", [5, 1])
@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(1.0), fxgrad.GradSample()], ids=str)
def test_compiled_autograd(quantity: Any, size: int) -> None:
    model = nn.Linear(3, 2)
    view = view_of(model, quantity)

    def step(x: torch.Tensor) -> None:
        view(x).sum().backward()

    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(OptionError, match="compiled autograd: hooks run in another order"),
    ):
        torch.compile(step, backend="eager")(X[:size])
    assert model.weight.grad is None
    fxgrad.zero_grad(model)
    step(X[:size])


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="torch 2.12 has it first")
def test_backwards_in_graphs() -> None:
    view = view_of(nn.Linear(3, 2))
    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(OptionError, match="trace_autograd_ops"):
        view(X)
    view(X).sum().backward()
