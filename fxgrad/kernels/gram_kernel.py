"""Norms by Gram matrices by a kernel of our own (gram.cpp), where it applies.

PyTorch multiplies one sample after another, both halves of matrices that are symmetric, and reads what comes out half a
dozen times. Here a matrix stays in the cache until its sums are taken.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.norms import Doubtful, gamma, norms_of_kernel

FEATURES = 96  # whose products are added up at once, at least

KERNELS = Library("common.cpp", "gram.cpp", computes="norms of linear layers with few positions")


def applies(g: Tensor, x: Tensor) -> bool:
    """Return whether the kernel can: float32 on CPU, matrices that a thread may hold."""
    return KERNELS.applies(g, x, copied=2 * g.shape[1] ** 2 * g.element_size())


def norms(g: Tensor, x: Tensor) -> tuple[Tensor, Doubtful]:
    """``‖Σ_k g[n, k] ⊗ x[n, k]‖`` and bounds, ``[2, n]``."""
    (n, k, o), i = g.shape, x.shape[2]
    given = g, g.stride(), x, x.stride(), n, k, o, i, rounding(o), rounding(i)
    return norms_of_kernel(g, partial(KERNELS.call, "gram_norms", *given))


def rounding(features: int) -> float:
    """Return how far a product of two positions may be off, of a product of their lengths."""
    return gamma(features, torch.float32, blocks=-(-features // FEATURES))
