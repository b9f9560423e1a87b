"""torch.func's transforms inside of the model: the derivative of a derivative by the parameters, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp, vmap

import fxgrad
from fxgrad.errors import FxgradError, MixedSamples
from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED

B, N = 4, 3


class Model(nn.Module):
    def __init__(self, body: Callable[[Callable[[Tensor], Tensor], Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.body = nn.Linear(N, N), nn.Linear(N, N), body

    def net(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.net, x, self)


def energy(net: Any, x: Tensor, model: Any) -> Tensor:
    """The gradient of an energy, summed over samples, by the input: a force."""
    return net(x) + grad(lambda x: net(x).square().sum())(x)


def curvature(net: Any, x: Tensor, model: Any) -> Tensor:
    inner = grad(lambda x: net(x).square().sum())
    return grad(lambda x: inner(x).square().sum())(x)


def pulled_back(net: Any, x: Tensor, model: Any) -> Tensor:
    y, back, *_ = vjp(net, x)
    return y + back(y.sin())[0]


def of_each_sample(net: Any, x: Tensor, model: Any) -> Tensor:
    return vmap(grad(lambda row: net(row).square().sum()))(x)


def jacobians(net: Any, x: Tensor, model: Any) -> Tensor:
    return vmap(jacrev(net))(x).sum(1)


def unread(net: Any, x: Tensor, model: Any) -> Tensor:
    """Dynamo leaves the calls that open and close the level."""
    vmap(torch.sin)(x)
    return net(x)


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize(
    "body", [energy, curvature, pulled_back, of_each_sample, jacobians, unread], ids=lambda body: body.__name__
)
def test_derivatives_in_the_model(body: Any, backend: str, device: torch.device) -> None:
    x = torch.randn(B, N, dtype=torch.float64, device=device)
    assert_per_sample_grads(Model(body).double().to(device), x, backend=backend)


def test_one_sample() -> None:
    assert_per_sample_grads(Model(energy).double(), torch.randn(1, N, dtype=torch.float64), backend="eager")


def test_a_derivative_by_a_parameter_sums_over_samples() -> None:
    def by_parameter(net: Any, x: Tensor, model: Any) -> Tensor:
        return x @ grad(lambda w: (x @ w).square().sum())(model.first.weight)

    with pytest.raises(MixedSamples, match="matmul lets samples influence each other"):
        fxgrad.transform(Model(by_parameter), backend="eager")(torch.randn(B, N))


def test_jvp_is_refused() -> None:
    """PyTorch's forward mode makes the batch a number while it is traced."""

    def pushed_forward(net: Any, x: Tensor, model: Any) -> Tensor:
        return jvp(net, (x,), (model.first(x),))[1]

    with pytest.raises(FxgradError, match="torch_func fixes the batch size"):
        fxgrad.transform(Model(pushed_forward), backend="eager")(torch.randn(B, N))
