"""torch.compile(model, backend="fxgrad"): whose results `fxgrad.result` returns, and what was used before the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import OptionError, OutsideGraph

# Dynamo looks at its inputs' .grad, and turns warnings that are errors into crashes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def compiled(model: nn.Module, quantity: Any) -> Any:
    return torch.compile(model, backend="fxgrad", options={"backend": "eager", "quantity": quantity})


def norms_of(model: nn.Module, x: Tensor) -> Tensor:
    rows = [torch.autograd.grad(model(one).sum(), list(model.parameters())) for one in x.split(1)]
    return torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])


def test_results_are_those_of_the_last_backward() -> None:
    """Batches of one, evaluation and frozen parameters have a graph each, and a store."""
    model, norms = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), fxgrad.NormSample()
    view = compiled(model, norms)
    for size in (5, 1, 4, 1, 5):
        x = torch.randn(size, 3, dtype=torch.float64)
        fxgrad.zero_grad(model)
        view(x).sum().backward()
        torch.testing.assert_close(fxgrad.result(view, norms), norms_of(model, x))
    fxgrad.zero_grad(model)
    with pytest.raises(OptionError, match="result has nothing of this model"):
        fxgrad.result(view, norms)


def test_two_models_with_one_quantity() -> None:
    """Models of one class have one graph, whose results are those of the model that ran last."""
    norms = fxgrad.NormSample()
    models = [nn.Linear(3, 2).double() for _ in range(2)]
    views = [compiled(model, norms) for model in models]
    x = torch.randn(5, 3, dtype=torch.float64)
    for model, view in zip(models, views, strict=True):
        view(x).sum().backward()
        torch.testing.assert_close(fxgrad.result(view, norms), norms_of(model, x))
    with pytest.raises(OptionError, match="or another model has used its graph since"):
        fxgrad.result(views[0], norms)


@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(1.0), fxgrad.GradSample()], ids=str)
def test_a_layer_that_no_graph_has(quantity: Any) -> None:
    """Its gradient would reach p.grad unclipped, and the norms would be those of the rest."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def front(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x))

        def forward(self, x: Tensor) -> Any:
            return self.last(self.front(x))

    with pytest.raises(
        OutsideGraph, match=r"used before the graph that torch.compile captured: of shape \[4, 3\], \[4\]"
    ):
        compiled(Broken(), quantity)(torch.randn(5, 3))
    frozen = Broken()
    frozen.first.requires_grad_(False)
    compiled(frozen, quantity)(torch.randn(5, 3)).sum().backward()
    assert frozen.first.weight.grad is None
