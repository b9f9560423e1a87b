"""Negated views, such as ``z.conj().imag``: compiled code would read their memory, which has the other sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import OptionError
from fxgrad.testing import assert_per_sample_grads


def negated(*shape: int) -> Tensor:
    value = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert value.is_neg()
    return value


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Buffer(scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale).tanh()


def a_parameter() -> tuple[nn.Module, Tensor]:
    model = Scaled(torch.ones(4))
    model.layer.bias = nn.Parameter(negated(3))
    return model, torch.randn(5, 4)


KINDS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "x": lambda: (Scaled(torch.ones(4)), negated(5, 4)),
    "scale": lambda: (Scaled(negated(4)), torch.randn(5, 4)),
    "layer.bias": a_parameter,
}


@pytest.mark.inductor
@pytest.mark.parametrize("name", KINDS)
def test_compiled_code_does_not_see_them(name: str) -> None:
    model, x = KINDS[name]()
    with pytest.raises(OptionError, match=rf"'{name}' is a negated view"):
        fxgrad.transform(model)(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", KINDS)
def test_pytorch_s_own_operators_know_them(name: str, backend: str) -> None:
    model, x = KINDS[name]()
    assert_per_sample_grads(model, x, backend=backend)


@pytest.mark.inductor
@pytest.mark.parametrize("one_graph", [False, True])
def test_a_later_call_is_looked_at(one_graph: bool) -> None:
    model = Scaled(torch.ones(4))
    private = fxgrad.transform(model, fxgrad.ClippedGrad(1.0))
    loss = fxgrad.forward_backward(private, lambda m, x: m(x).sum())
    step = loss if one_graph else lambda x: private(x).sum().backward()
    for _ in range(3):
        step(torch.randn(5, 4))
    fxgrad.zero_grad(private)
    with pytest.raises(OptionError, match="'x' is a negated view"):
        step(negated(5, 4))
    assert model.layer.weight.grad is None
    step(negated(5, 4).resolve_neg())
    model.layer.bias.data = negated(3)
    fxgrad.zero_grad(private)
    with pytest.raises(OptionError, match=r"'layer\.bias' is a negated view"):
        step(torch.randn(5, 4))


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_those_that_a_forward_makes_are_compiled() -> None:
    class Imaginary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, z: Tensor) -> Tensor:
            return self.layer(z.conj().imag).tanh() + self.layer(z.real)

    z = torch.randn(5, 4, dtype=torch.complex64)
    for value in (z, z.conj()):
        assert_per_sample_grads(Imaginary(), value, backend="inductor")


@pytest.mark.inductor
def test_a_gradient_may_be_one() -> None:
    model: Any = Scaled(torch.ones(4))
    x, g = torch.randn(5, 4), negated(5, 3)
    fxgrad.transform(model)(x).backward(g)
    found = model.layer.weight.grad_sample
    model.zero_grad()
    model(x).backward(g)
    torch.testing.assert_close(found.sum(0), model.layer.weight.grad)
