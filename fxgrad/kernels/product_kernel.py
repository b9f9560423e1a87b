"""Products of every sample's positions by a kernel of our own (products.cpp), where it applies.

PyTorch multiplies one sample after another by MKL, which on the processor of docs/performance.md reaches half of this
kernel's rate, and then reads the results again for their norms.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from fxgrad.kernels.compiled import LARGEST, Library, parts_of

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
LONG, WIDE = 64, 32  # positions, and outputs and inputs, from which it is faster than MKL where no norms are wanted


KERNELS = Library(
    [Path(__file__).with_name(name) for name in ("common.cpp", "products.cpp")],
    {
        "product_rows": [_POINTER] * 4 + [_SIZE] * 4 + [_POINTER] * 2 + [_SIZE, ctypes.c_int],
        "outer_rows": [_POINTER] * 2 + [_SIZE] * 3 + [_POINTER, ctypes.c_int],
    },
    computes="linear layers",
)


def applies(g: Tensor, x: Tensor) -> bool:
    """Whether the kernel can: float32 on CPU."""
    small = bool(g.numel() and x.numel()) and x[0].numel() * x.element_size() <= LARGEST
    return KERNELS.takes(g, x) and small and KERNELS.functions is not None


def outer(g: Tensor, x: Tensor, out: Tensor) -> None:
    """``g[n, o] x[n, i]`` into ``out`` ``[n, o, i]``, contiguous."""
    kernels = KERNELS.functions
    assert kernels is not None
    g, x = g.contiguous(), x.contiguous()
    kernels.outer_rows(g.data_ptr(), x.data_ptr(), *out.shape, out.data_ptr(), torch.get_num_threads())


def pays(g: Tensor, x: Tensor) -> bool:
    """Whether it is faster than a product for each sample, without norms."""
    return g.shape[1] >= LONG and min(g.shape[2], x.shape[2]) >= WIDE


def rows(g: Tensor, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``Σ_k g[n, k, o] x[n, k, i]`` into ``out`` ``[n, o, i]``, contiguous, where there is one.

    Returns what they square to, ``Σ_k ‖g_nk‖ ‖x_nk‖``, which bounds their rounding, and how much of that is only there
    because squares may underflow: ``[n]``, in float64.
    """
    kernels = KERNELS.functions
    assert kernels is not None
    (n, k, o), i, threads = g.shape, x.shape[2], torch.get_num_threads()
    parts = parts_of(n, o, g[0].numel() * g.element_size(), threads)
    found = torch.empty(3, n, parts, dtype=torch.float64)
    sides = [(side.data_ptr(), (_SIZE * 3)(*side.stride())) for side in (g, x)]
    to = None if out is None else out.data_ptr()
    kernels.product_rows(*sides[0], *sides[1], n, k, o, i, to, found.data_ptr(), parts, threads)
    squares, lengths, lost = found.sum(2)
    return squares, lengths, lost
