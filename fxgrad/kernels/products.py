"""Sums of products over the positions of a sample, D_n = Σ_k g_nk ⊗ x_nk, with their norms, or those alone.

one position    ‖D_n‖ = ‖g_n‖ ‖x_n‖
Gram            D_n is never there (gram.py)
rows            D_n itself, a few samples at a time: kept, or looked at and dropped
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fxgrad.kernels import gram_kernel, product_kernel
from fxgrad.kernels.convolutions import CACHED
from fxgrad.kernels.fusible import fusible
from fxgrad.kernels.gram import gram_norms
from fxgrad.kernels.in_parts import gram_elements, inner_of, outer
from fxgrad.kernels.memory import fresh
from fxgrad.kernels.norms import (
    again,
    by_blocks,
    frobenius,
    gamma,
    is_readable,
    is_wide,
    joined,
    measured,
    norms_like,
    quick_frobenius,
    slices,
    sum_squares,
)
from fxgrad.kernels.operators import ANY_LAYOUT, operator
from fxgrad.kernels.precision import computable, rounding_of_factors
from fxgrad.kernels.sums import positions

Norm = Callable[[Tensor], Tensor]


def product_rounding(g: Tensor, x: Tensor, norm: Norm = frobenius, dtype: torch.dtype | None = None) -> Tensor:
    """Return how far the norm of ``Σ_k g_nk ⊗ x_nk`` may be from the one in exact arithmetic: γ Σ_k ‖g_nk‖ ‖x_nk‖.

    γ counts what a product's factors may be rounded to.

    Of sums in ``dtype``, or in g's own.
    """
    n, k = g.shape[:2]
    lengths = (norm(g.flatten(0, 1)) * norm(x.flatten(0, 1))).view(n, k)
    return 1.001 * (gamma(k, dtype or g.dtype) + rounding_of_factors(g)) * lengths.sum(1)


@fusible(norms_like)
def rank_one_norms(g: Tensor, x: Tensor) -> Tensor:
    """‖g_n ⊗ x_n‖ = ‖g_n‖ ‖x_n‖ of one position's g and x."""
    if any(is_wide(side) or side.is_complex() for side in (g, x)):
        norms = frobenius(g) * frobenius(x)
    else:
        norms = (sum_squares(g) * sum_squares(x)).sqrt()
    return joined(norms, norms * (1 + 1e-12))


def _fake_norms(g: Tensor, x: Tensor, gram: bool) -> Tensor:
    (gram_kernel if gram else product_kernel).KERNELS.start(g)
    return norms_like(g)


def _fake_rows(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape[0], g.shape[-1], x.shape[-1]), _fake_norms(g, x, False)


@operator(_fake_norms, ANY_LAYOUT)
def product_norms(g: Tensor, x: Tensor, gram: bool) -> Tensor:
    """``‖Σ_k g[n, k.., o] x[n, k.., i]‖`` and its bound."""
    g, x = computable(positions(g)), computable(positions(x))
    (_, k, o), i = g.shape, x.shape[2]

    if gram and gram_kernel.applies(g, x):
        return again(g, x, *gram_kernel.norms(g, x), _carefully)
    if not gram and product_kernel.applies(g, x):
        return again(g, x, *product_kernel.norms(g, product_kernel.rows(g, x, None)), _carefully)
    of_gram = 2 * k * k if is_readable(g) else gram_elements(k, o, i)
    size = (of_gram if gram else o * i) * g.element_size()
    by_gram = partial(gram_norms, inner=inner_of(g))
    return by_blocks(g, x, slices(g, size), by_gram if gram else _norms_of_rows, _carefully)


def _norms_of_rows(g: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    rows = g.mT @ x if is_readable(g) else outer(g, x)
    return measured(rows, product_rounding(g, x, quick_frobenius, dtype))


def _carefully(g: Tensor, x: Tensor) -> Tensor:
    """Measure in float64; what is finite in g's dtype has a finite norm here.

    The bound is for g's dtype all the same: that is what the weighted sum is multiplied out in.
    """
    return _norms_of_rows(g.double(), x.double(), g.dtype)


@operator(_fake_rows, ANY_LAYOUT)
def product_rows(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ_k g[n, k.., o] x[n, k.., i]`` as ``[n, o, i]``, with the norms and bounds."""
    g, x = positions(g), positions(x)
    (n, k, o), i = g.shape, x.shape[2]
    out = fresh(g, (n, o, i))
    if product_kernel.applies(g, x):
        norms, doubtful = product_kernel.norms(g, product_kernel.rows(g, x, out))
        if doubtful is not None:
            rounding = product_rounding(g[doubtful], x[doubtful], quick_frobenius)
            norms[:, doubtful] = measured(out[doubtful], rounding)
        return out, norms
    norms = norms_like(g)
    size = max(2, CACHED // max(1, (k * o + k * i + o * i) * g.element_size())) if is_readable(g) else max(n, 1)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        if is_readable(g):
            torch.bmm(g[rows].mT, x[rows], out=out[rows])
        else:
            outer(g[rows], x[rows], out=out[rows])
        norms[:, rows] = measured(out[rows], product_rounding(g[rows], x[rows], quick_frobenius))
    return out, norms
