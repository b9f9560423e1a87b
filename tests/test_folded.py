"""Products of a batch with one matrix become one product, in the graphs that Inductor gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import fxgrad
from fxgrad.testing import assert_per_sample_grads, default_loss

pytestmark = pytest.mark.inductor


class Layer(nn.Module):
    """A product with a parameter, of an input that another parameter scales, so that it has a gradient."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 5))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x * self.scale, self.weight)


def sequence_first(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x.transpose(0, 1), w.t()).transpose(0, 1)


def four_dimensions(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([x, x.sin()], 1) @ w


FOLDED = {"sequence first": sequence_first, "a product": torch.matmul, "four dimensions": four_dimensions}


def code_of(model: nn.Module, x: Tensor) -> str:
    """Return what Inductor wrote for a forward and a backward under `ClippedGrad`."""
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0))
    _, codes = run_and_get_code(lambda: default_loss(transformed(x)).backward())
    return "\n".join(codes)


@pytest.mark.parametrize("product", FOLDED.values(), ids=FOLDED)
def test_one_product(product: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
    torch.manual_seed(0)
    model = Layer(product).to(device)
    for n in (4, 3):  # a batch that is as long as the sequence, and another
        assert_per_sample_grads(model, torch.randn(n, 4, 6, device=device), backend="inductor", tolerance=1e-4)
    assert "bmm(" not in code_of(model, torch.randn(5, 4, 6, device=device))


def test_attention_with_the_batch_first(device: torch.device) -> None:
    """PyTorch's module computes with the sequence first."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device)
    assert_per_sample_grads(layer, torch.randn(3, 3, 8, device=device), backend="inductor", tolerance=1e-4)
    assert "bmm(" not in code_of(layer, torch.randn(5, 3, 8, device=device))


def test_channels_that_are_moved_stay(device: torch.device) -> None:
    """They would have to be copied."""
    layer = nn.Linear(6, 5).to(device)

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x.transpose(1, 2))
            return y

    x = torch.randn(5, 6, 4, device=device)
    assert_per_sample_grads(Moved(), x, backend="inductor", tolerance=1e-4)
    assert "bmm(" in code_of(Moved(), x)


def test_rows_without_numbers(device: torch.device) -> None:
    """A view to ``[-1, 0]`` has no number of rows."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(0, 5)), nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            return x[..., :0] @ self.weight + self.bias

    assert_per_sample_grads(Empty().to(device), torch.randn(3, 4, 6, device=device), backend="inductor")


def test_a_batch_of_nothing(device: torch.device) -> None:
    """It has no matrix to take."""

    class Nothing(nn.Module):
        fixed: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(6))
            self.register_buffer("fixed", torch.randn(6, 5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * self.scale
            none = y.transpose(0, 1).contiguous()[:0]
            return torch.bmm(none, self.fixed.expand(none.shape[0], 6, 5)).transpose(0, 1), y @ self.fixed

    found = fxgrad.transform(Nothing().to(device))(torch.randn(3, 4, 6, device=device))
    assert [tuple(one.shape) for one in found] == [(3, 0, 5), (3, 4, 5)]


@pytest.mark.parametrize("bias", [False, True])
def test_results_keep_the_traced_strides(bias: bool, device: torch.device) -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x.transpose(0, 1))
            return y

    model, x = Returned().to(device), torch.randn(5, 4, 6, device=device)
    with torch.no_grad():
        expected = model(x)
    found = fxgrad.transform(model)(x)
    torch.testing.assert_close(found, expected, check_stride=True, rtol=1e-5, atol=1e-6)
