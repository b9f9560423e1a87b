"""The kernels in C++ for products of every sample's positions and their Gram matrices, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxgrad.kernels import compiled, gram_kernel, product_kernel
from fxgrad.kernels import products as operators_of_products
from fxgrad.kernels.dense import products
from fxgrad.kernels.products import product_norms, product_rows
from tests.layouts import expanded


def every(g: Tensor, x: Tensor) -> list[Tensor]:
    """Norms and bounds, of what is kept, of what is not, and of what is never there."""
    return [product_rows(g, x)[1], product_norms(g, x, False), product_norms(g, x, True)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_shape_and_layout(data: Any) -> None:
    draw = data.draw
    n, k = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 33, 64, 513, 1100]))
    o, i = draw(st.sampled_from([1, 7, 8, 33])), draw(st.sampled_from([1, 15, 16, 49, 100]))
    torch.manual_seed(draw(st.integers(0, 99)))
    layouts = [lambda d: torch.randn(n, k, d), lambda d: torch.randn(k, n, d).transpose(0, 1),
               lambda d: torch.randn(n, d, k).mT]  # fmt: skip
    g, x = draw(st.sampled_from(layouts))(o), draw(st.sampled_from(layouts))(i)
    g, x = (expanded(value, *draw(st.sets(st.integers(0, 2), max_size=2))) for value in (g, x))
    assert product_kernel.applies(g, x) and gram_kernel.applies(g, x)
    true = g.double().mT @ x.double()
    near = 1e-5 * float(g.norm() * x.norm())
    torch.testing.assert_close(product_rows(g, x)[0].double(), true, rtol=1e-5, atol=near)
    norms, most = true.flatten(1).norm(dim=1), (g.norm(dim=2) * x.norm(dim=2)).sum(1)
    *multiplied_out, gram = every(g, x)
    for norm, bound in (*multiplied_out, gram):
        torch.testing.assert_close(norm, norms, rtol=1e-5, atol=near)
        assert (bound >= norms * (1 - 1e-12)).all()
    assert all((bound <= norms + 1e-3 * most).all() for _, bound in multiplied_out)
    assert (gram[1].square() <= norms.square() + 2e-5 * most.square()).all()  # what is rounded are squares


@pytest.mark.parametrize(("threads", "copied"), [(1, 1 << 20), (2, 1 << 20), (7, 1 << 20), (1, 400), (2, 99)])
def test_a_sample_in_parts(monkeypatch: pytest.MonkeyPatch, threads: int, copied: int) -> None:
    """Of its outputs, where there are more threads than samples or a copy of all would be large."""
    monkeypatch.setattr(compiled, "COPIED", copied)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    g, x = torch.randn(2, 9, 21), torch.randn(2, 9, 5)
    out, (norm, bound) = product_rows(g, x)
    true = g.double().mT @ x.double()
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm, true.flatten(1).norm(dim=1), rtol=1e-5, atol=0)
    assert (bound >= true.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e18, 1e30])
def test_norms_where_squares_leave_float32(scale: float) -> None:
    g, x = torch.randn(3, 9, 4), torch.randn(3, 9, 5)
    g[1] *= scale
    norms = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    for norm, bound in every(g, x):
        torch.testing.assert_close(norm, norms, rtol=1e-5, atol=0)
        assert (bound >= norms * (1 - 1e-12)).all() and (bound <= norms * 1.001).all()


def test_a_sample_that_is_not_finite_stays_alone() -> None:
    g, x = torch.randn(4, 9, 4), torch.randn(4, 9, 5)
    g[1, 0, 0], x[2, 8, 4] = torch.inf, torch.nan
    for norm, bound in every(g, x):
        assert norm[[0, 3]].isfinite().all() and bound[[0, 3]].isfinite().all()
        assert not bound[1].isfinite() and not bound[2].isfinite()


def test_gradients_alone_are_products_too() -> None:
    g, x = torch.randn(3, 70, 130), torch.randn(3, 70, 140)
    assert product_kernel.pays(g, x)
    torch.testing.assert_close(products(g, x), g.mT @ x, rtol=1e-4, atol=1e-4)


LARGE = [(40, 1, 170, 157), (11, 70, 330, 353), (40, 1, 1, 33000), (1, 1, 1100, 1000), (70, 1, 4000, 5)]


@pytest.mark.parametrize("shape", LARGE)
def test_large_results_are_written_past_the_cache(shape: tuple[int, int, int, int]) -> None:
    n, k, o, i = shape
    g, x = torch.randn(n, o, k).mT, torch.randn(k, n, i).transpose(0, 1)
    g[0, 0, 0] = torch.inf
    assert product_kernel.applies(g, x) and n * o * i * 4 > 4 << 20
    true = (g.double().mT @ x.double()).float()
    torch.testing.assert_close(products(g, x), true, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(product_rows(g, x)[0], true, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_without_a_compiler_pytorch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    g, x = torch.randn(3, 9, 4), torch.randn(3, 9, 5)
    found = every(g, x)
    for kernel in (product_kernel, gram_kernel):
        monkeypatch.setattr(kernel.KERNELS, "functions", None)
        assert not kernel.applies(g, x)
    torch.testing.assert_close(found, every(g, x), rtol=1e-4, atol=0)


def test_the_bound_where_squares_of_g_underflow() -> None:
    g, x = torch.full((1, 402, 1), 1e-23), torch.zeros(1, 402, 2)
    x[0, 0, 0], x[0, 1:-1, 0], x[0, -1, 0], x[0, 0, 1] = 1e18, 2.5e10, -1e18, 2e11
    norm = (g.double().mT @ x.double()).norm()
    assert all(found[1, 0] >= norm for found in every(g, x))


def test_samples_without_a_gradient_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators_of_products, "_carefully", None)
    g, x = torch.randn(3, 9, 4), torch.randn(3, 9, 5)
    g[1] = 0
    for gram in (False, True):
        found = product_norms(g, x, gram)
        assert (found[:, 1] == 0).all() and (found[:, [0, 2]] > 0).all()


@pytest.mark.parametrize(("o", "i"), [(95, 97), (96, 1), (700, 193)])
def test_gram_matrices_of_many_features_are_added_up(o: int, i: int) -> None:
    """Some features at a time, of every layout."""
    torch.manual_seed(0)
    for k in (1, 16, 17, 130):
        g, x = torch.randn(3, 2 * o, k).mT[..., ::2], torch.randn(3, k, i)
        norms = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
        norm, bound = product_norms(g, x, True)
        torch.testing.assert_close(norm, norms, rtol=1e-6, atol=0)
        assert (bound >= norms).all() and (bound <= norms * 1.001).all()


@pytest.mark.parametrize(("of_g", "of_x"), [(1e-27, 1e14), (1e14, 1e-27), (1e-24, 1e15)])
def test_what_underflows_does_not_rule_the_bound(of_g: float, of_x: float) -> None:
    g, x = torch.randn(2, 16, 40) * of_g, torch.randn(2, 16, 30) * of_x
    norms = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    for _, bound in every(g, x):
        assert (bound >= norms * (1 - 1e-12)).all() and (bound <= norms * 1.001).all()


def test_terms_that_cancel() -> None:
    """Σ_k g_k ⊗ x_k is nothing beside its terms: the bound of its norm is not."""
    g, x = torch.randn(2, 64, 40), torch.randn(2, 64, 30)
    g[:, 32:], x[:, 32:] = g[:, :32], -x[:, :32] * (1 + 1e-7)
    norms = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    for _, bound in every(g, x):
        assert (bound >= norms).all()
