"""Products of every sample's positions by a kernel of our own (products.cpp), where it applies.

PyTorch multiplies one sample after another by MKL, which on the processor of docs/performance.md reaches half of this
kernel's rate, and then reads the results again for their norms.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library, parts_of
from fxgrad.kernels.norms import Doubtful, gamma, norms_of_kernel

LONG, WIDE = 64, 32  # positions, and outputs and inputs, from which it is faster than MKL where no norms are wanted

KERNELS = Library("common.cpp", "products.cpp", computes="linear layers")


def applies(g: Tensor, x: Tensor) -> bool:
    """Return whether the kernel can: float32 on CPU."""
    return KERNELS.applies(g, x, copied=x.shape[1:].numel() * x.element_size())


def outer(g: Tensor, x: Tensor, out: Tensor) -> None:
    """``g[n, o] x[n, i]`` into ``out`` ``[n, o, i]``, contiguous."""
    KERNELS.call("outer_rows", g.contiguous(), x.contiguous(), *out.shape, out)


def pays(g: Tensor, x: Tensor) -> bool:
    """Return whether it is faster than a product for each sample, without norms."""
    return g.shape[1] >= LONG and min(g.shape[2], x.shape[2]) >= WIDE


def rows(g: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """``Σ_k g[n, k, o] x[n, k, i]`` into ``out`` ``[n, o, i]``, contiguous, where there is one.

    Returns what they square to, ``Σ_k ‖g_nk‖ ‖x_nk‖``, which bounds their rounding, and how much of that is only there
    because squares may underflow: ``[3, n, parts]``, in float64.
    """
    (n, k, o), i = g.shape, x.shape[2]
    parts = parts_of(n, o, g[0].numel() * g.element_size())
    sums = torch.empty(3, n, parts, dtype=torch.float64)
    KERNELS.call("product_rows", g, g.stride(), x, x.stride(), n, k, o, i, out, sums, parts)
    return sums


def norms(g: Tensor, sums: Tensor) -> tuple[Tensor, Doubtful]:
    """Norms and bounds ``[2, n]`` of what `rows` found."""
    rounding = 1.001 * gamma(g.shape[1], g.dtype)
    return norms_of_kernel(g, partial(KERNELS.call, "product_norms", sums, *sums.shape[1:], rounding))
