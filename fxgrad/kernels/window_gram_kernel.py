"""Norms of convolutions by Gram matrices by a kernel of our own (window_gram.cpp), where it applies.

Where positions are few and channels many, the Gram matrices of a sample are smaller than its gradient, and stay in the
cache: PyTorch's ops write and read each of them a dozen times.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.gram_kernel import rounding
from fxgrad.kernels.norms import Doubtful, norms_of_kernel
from fxgrad.kernels.precision import unit
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.window_kernel import as_images

KERNELS = Library(
    "common.cpp", "gram.cpp", "shape.cpp", "window_gram.cpp", computes="norms of convolutions with few positions"
)


def applies(g: Tensor, input: Tensor, kernel: Sequence[int]) -> bool:
    """Return whether the kernel can: float32 on CPU, one image of one or two dimensions, matrices a thread may hold."""
    positions, pixels = (math.prod(side.shape[3:]) for side in (g, input))
    held = (2 * positions**2 + pixels**2) * g.element_size()
    return len(kernel) in (3, 4) and g.shape[1] == 1 and KERNELS.applies(g, input, copied=held)


def norms(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> tuple[Tensor, Doubtful]:
    """Norms of the weight's gradients and bounds, ``[2, n]``.

    From g ``[n, 1, out, *space]`` and input ``[n, 1, in, *space]`` of a convolution without groups.
    """
    g, input, shape = as_images(g, input, kernel, settings)
    g, input = (side.squeeze(1).flatten(2).mT for side in (g, input))  # [n, positions, channels]
    places = math.prod(kernel[2:])
    off = rounding(shape.outs), rounding(shape.channels) + places * unit(torch.float32)
    given = g, g.stride(), input, input.stride(), ctypes.byref(shape), *off
    return norms_of_kernel(g, partial(KERNELS.call, "window_gram_norms", *given))
