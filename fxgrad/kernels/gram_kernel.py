"""Norms by Gram matrices by a kernel of our own (gram.cpp), where it applies.

PyTorch multiplies one sample after another, both halves of matrices that are symmetric, and reads what comes out half a
dozen times. Here a matrix stays in the cache until its sums are taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.gram import from_squares
from fxgrad.kernels.norms import SMALL, gamma

FEATURES = 96  # whose products are added up at once, at least
LOST = 1.2e-38  # of a square that underflows, at most
VECTOR = 8  # numbers, at least

KERNELS = Library("common.cpp", "gram.cpp", computes="norms of linear layers with few positions")


def applies(g: Tensor, x: Tensor) -> bool:
    """Return whether the kernel can: float32 on CPU, matrices that a thread may hold."""
    return KERNELS.applies(g, x, copied=2 * g.shape[1] ** 2 * g.element_size())


def norms(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``‖Σ_k g[n, k] ⊗ x[n, k]‖`` and bounds, ``[2, n]``, and which float32's range may have spoilt, ``[n]``."""
    (n, k, o), i = g.shape, x.shape[2]
    sums = torch.empty(7, n, dtype=torch.float64)
    KERNELS.call("gram_sums", g, g.stride(), x, x.stride(), n, k, o, i, sums)
    square, size, by_g, by_x, by_both, of_g, of_x = sums
    underflow = LOST * (o * of_x.square() + i * of_g.square())
    off_g, off_x = _rounding(o), _rounding(i)
    slack = off_g * by_g + off_x * by_x + off_g * off_x * by_both.square()
    slack = slack + gamma(k // VECTOR + 2, g.dtype) * size + underflow
    norms = from_squares(square, 1.01 * slack)
    return norms, ~norms[1].isfinite() | (norms[1] < SMALL) | (underflow > 1e-7 * square)


def _rounding(features: int) -> float:
    return gamma(features, torch.float32, blocks=-(-features // FEATURES))
