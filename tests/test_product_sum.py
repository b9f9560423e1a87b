"""Weighted sums of products over samples: each form against float64, and what a compiled one holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.costs.machines import REFERENCE, pinned
from fxgrad.kernels.sums import fused_product_sum, product_sum, small_product_sum
from tests.allocations import peak
from tests.layouts import LAYOUTS, in_layout

FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one operator": lambda g, x, c: product_sum(g, x, c, False),
    "by oneDNN": lambda g, x, c: product_sum(g, x, c, True),
    "weighted by the compiler": lambda g, x, c: fused_product_sum(g, x, c, False),
    "weighted by the compiler, by oneDNN": lambda g, x, c: fused_product_sum(g, x, c, True),
    "left to the compiler": small_product_sum,
}
SMALL = [(6, 5, 8, 3), (6, 5, 3, 8), (6, 5, 4, 4), (6, 1, 8, 3), (6, 1, 3, 8)]
SHAPES = [*SMALL, (6, 40, 32, 16), (3, 600, 2, 3), (1, 5, 4, 3), (0, 5, 4, 3)]  # two beyond what a loop sums


def expected(g: Tensor, x: Tensor, c: Tensor) -> Tensor:
    kept = c != 0
    return torch.einsum("n,nko,nki->oi", c[kept].double(), g[kept].double(), x[kept].double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_weights(form: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> None:
    n, k, o, i = shape
    g, x, c = torch.randn(n, k, o), torch.randn(n, k, i), torch.rand(n)
    torch.testing.assert_close(form(g, x, c).double(), expected(g, x, c), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES[:7], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_sample_of_weight_0_counts_for_nothing(form: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> None:
    n, k, o, i = shape
    for side in range(2):
        for value in (float("inf"), float("nan")):
            factors = torch.randn(n, k, o), torch.randn(n, k, i)
            factors[side][2] = value
            c = torch.rand(n)
            c[2] = 0
            torch.testing.assert_close(form(*factors, c).double(), expected(*factors, c), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_layouts(form: Callable[..., Tensor], layout: str) -> None:
    for o, i in ((7, 3), (3, 7)):
        g, x, c = in_layout(torch.randn(6, 5, o), layout), in_layout(torch.randn(6, 5, i), layout), torch.rand(6)
        torch.testing.assert_close(form(g, x, c).double(), expected(g, x, c), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_positions_first(form: Callable[..., Tensor]) -> None:
    g, x, c = torch.randn(5, 6, 7).transpose(0, 1), torch.randn(5, 6, 3).transpose(0, 1), torch.rand(6)
    torch.testing.assert_close(form(g, x, c).double(), expected(g, x, c), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_halves_are_summed_as_floats(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    n, k, o, i = shape
    g, x, c = torch.randn(n, k, o).to(dtype), torch.randn(n, k, i).to(dtype), torch.rand(n).to(dtype)
    torch.testing.assert_close(small_product_sum(g, x, c).double(), expected(g, x, c), rtol=2e-2, atol=4e-2)
    g, x, c = torch.full((2, 1, 2), 300.0), torch.full((2, 1, 3), 300.0), torch.ones(2)
    g[1] = -299.0  # each product is beyond float16, their sum is not
    torch.testing.assert_close(small_product_sum(g.half(), x.half(), c), torch.full((2, 3), 300.0).half())


@pytest.mark.inductor
def test_few_products_are_summed_without_a_copy() -> None:
    layer, x, y = nn.Linear(512, 2), torch.randn(64, 512), torch.randn(64, 2)
    private = fxgrad.transform(layer, fxgrad.ClippedGrad(1.0))
    step = fxgrad.forward_backward(private, lambda m, x, y: (0.5 * (m(x) - y).square().sum(1)).sum())
    step(x, y)
    fxgrad.zero_grad(private)
    assert peak(lambda: step(x, y)) < 0.2 * x.numel() * x.element_size()


@pytest.mark.inductor
@pytest.mark.parametrize("onednn", [False, True], ids=["MKL", "oneDNN"])
def test_the_weighted_gradient_takes_the_place_of_the_gradient(onednn: bool) -> None:
    layer, x, y = nn.Linear(256, 256), torch.randn(64, 64, 256), torch.randn(64, 64, 256)
    with pinned(replace(REFERENCE, mkl=REFERENCE.onednn / (2 if onednn else 1))):
        private = fxgrad.transform(layer, fxgrad.ClippedGrad(1.0), strategy="gram")
        step = fxgrad.forward_backward(private, lambda m, x, y: (0.5 * (m(x) - y).square().flatten(1).sum(1)).sum())
        step(x, y)
        fxgrad.zero_grad(private)
        held = peak(lambda: step(x, y))
    factor = x.numel() * x.element_size()
    assert held < 1.5 * factor
