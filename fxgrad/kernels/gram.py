"""Norms of sums of products by Gram matrices, ‖Σ_k g_k ⊗ x_k‖² = Σ_kl (g_k·g_l)(x_k·x_l), and their rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.host.dispatch import tracer
from fxgrad.kernels.in_parts import Inner, by_library, inner_of
from fxgrad.kernels.norms import gamma
from fxgrad.kernels.precision import rounding_of_factors
from fxgrad.kernels.settings import Settings


def gram_norms(g: Tensor, x: Tensor, inner: Inner = by_library, long: int = 32) -> Tensor:
    """‖D_n‖² = Σ_kl (g_k·g_l)(x_k·x_l); from ``long`` sequences' symmetric matrices a quarter is left out."""
    n, k = g.shape[:2]
    if k % 2 or k < long:
        square, slack = met(inner(g, g), inner(x, x), g.shape[2], x.shape[2])
        return from_squares(square, slack)
    halves = [side.reshape(n, 2, k // 2, -1) for side in (g, x)]
    by_g, by_x = (inner(both, both) for both in (half.flatten(0, 1) for half in halves))
    of_g, of_x = (own_lengths(gram)[0].view(n, 2, k // 2, 1) for gram in (by_g, by_x))
    same_half = met(by_g, by_x, g.shape[2], x.shape[2])
    by_g, by_x = (inner(half[:, 0], half[:, 1]) for half in halves)
    across = (of_g[:, 0], of_g[:, 1]), (of_x[:, 0], of_x[:, 1])
    other = met(by_g, by_x, g.shape[2], x.shape[2], *across)
    return from_squares(*(one.view(n, 2).sum(1) + 2 * two for one, two in zip(same_half, other, strict=True)))


Lengths = tuple[Tensor, Tensor]  # ‖g_k‖ of the rows of a Gram matrix and of its columns, [n, k, 1]


def met(
    by_g: Tensor, by_x: Tensor, o: int, i: int, of_g: Lengths | None = None, of_x: Lengths | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_kl of the products of two Gram matrices, of vectors of o and i elements, and how far rounding may be off."""
    of_g, of_x = of_g or own_lengths(by_g), of_x or own_lengths(by_x)
    products = by_g * by_x
    square = products.sum((1, 2), dtype=torch.float64)
    factors = rounding_of_factors(by_g)
    slack = (
        (gamma(o, by_g.dtype) + factors) * _quadratic(of_g[0], _absolute(by_x), of_g[1])
        + (gamma(i, by_x.dtype) + factors) * _quadratic(of_x[0], _absolute(by_g), of_x[1])
        + gamma(1, by_g.dtype) * _absolute(products).sum((1, 2), dtype=torch.float64)
    )
    return square, 1.01 * slack


def _absolute(gram: Tensor) -> Tensor:
    """In a matrix's own memory, but in a traced graph, which stays functional."""
    return gram.abs_() if tracer() is None else gram.abs()


def own_lengths(gram: Tensor) -> Lengths:
    lengths = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().unsqueeze(2)
    return lengths, lengths


def _quadratic(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """leftᵀ M right for each sample; in a traced graph as ops of one loop."""
    if tracer() is None:
        return ((matrix @ right) * left).sum((1, 2), dtype=torch.float64)
    return (matrix * left * right.mT).sum((1, 2), dtype=torch.float64)


def from_squares(square: Tensor, slack: Tensor) -> Tensor:
    square = square.clamp(min=0)
    return torch.stack([square.sqrt(), (square + slack).sqrt() * (1 + 1e-12)])


def pixels_of(rows: Tensor) -> Tensor:
    """``[n, 1, channels, *space]`` as ``[n, channels, pixels]``."""
    return rows.flatten(0, 1).flatten(2)


def window_gram(input: Tensor, out: Sequence[int], kernel: Sequence[int], settings: Settings) -> Tensor:
    """Return the products of all windows of ``[n, channels, *space]`` with each other: ``[n, windows, windows]``.

    ``<patch_k, patch_l> = Σ_shift <pixel_(k + shift), pixel_(l + shift)>``: the pixels' Gram matrix, added up over
    the shifts inside the kernel. No patch is ever built (Rochette et al. 2019 build them).
    """
    sizes = tuple(input.shape[2:])
    flat = input.flatten(2).mT
    pixels = inner_of(flat)(flat, flat).view(len(input), *sizes, *sizes)
    stride, padding, dilation, *_ = settings
    total = pixels.new_zeros(len(input), *out, *out)
    for shift in itertools.product(*(range(size) for size in kernel)):
        cuts = [
            _inside(s * d - p, step, size, o)
            for s, d, p, step, size, o in zip(shift, dilation, padding, stride, sizes, out, strict=True)
        ]
        windows, seen = zip(*cuts, strict=True)
        total[(slice(None), *windows, *windows)] += pixels[(slice(None), *seen, *seen)]
    return total.view(len(input), math.prod(out), math.prod(out))


def _inside(start: int, step: int, size: int, out: int) -> tuple[slice, slice]:
    """Return the windows whose entry at ``start + step * window`` lies inside of the input, and those entries."""
    first = max(0, -(start // step))
    last = max(first, min(out, (size - 1 - start) // step + 1))
    return slice(first, last), slice(start + first * step, max(0, start + (last - 1) * step + 1), step)
