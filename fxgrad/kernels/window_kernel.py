"""The weight gradients of a convolution for each sample by a kernel of our own, where one applies.

Where groups are large, a vector holds the inputs of a window (windows.cpp); where they are small and many, as in a
depthwise convolution, it holds as many groups (depthwise.cpp).

PyTorch's kernels are made for a batch. One sample at a time, or as the groups of one call, they reach a third to two
thirds of their rate, and every call copies: into the library's layout, and back. These read values in the layout
they have, write what they found once, and take the norms on the way (docs/performance.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library, parts_of
from fxgrad.kernels.norms import Doubtful, norms_of_kernel
from fxgrad.kernels.settings import Settings

FEW = 4  # outputs of a group, and half of the numbers in a window's row, below which most of a vector would be padding
LANES = 16  # of a vector, at most: groups that are computed together


class Shape(ctypes.Structure):
    """The sizes of a convolution, as ``struct Shape`` of windows.cpp has them; a test compares the two."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in """samples images outs out_rows out_columns channels rows columns kernel_rows kernel_columns
        row_stride column_stride row_padding column_padding row_dilation column_dilation groups""".split()
    )


KERNELS = Library("common.cpp", "shape.cpp", "windows.cpp", "depthwise.cpp", computes="convolutions")


def applies(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> bool:
    """Return whether a kernel can: float32 on CPU, one or two dimensions of space, large groups or many."""
    plain = len(kernel) in (3, 4) and (_large_groups(kernel, settings) or 2 * settings.groups >= LANES)
    image = g if settings.transposed else input
    return plain and KERNELS.applies(g, input, copied=image.shape[1:].numel() * image.element_size())


def _large_groups(kernel: Sequence[int], settings: Settings) -> bool:
    return settings.groups == 1 or (kernel[0] // settings.groups >= FEW and kernel[1] * kernel[-1] >= 2 * FEW)


def rows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings, out: Tensor | None) -> Tensor:
    """``[n, *kernel]`` into ``out``, contiguous, where there is one, from g ``[n, k, out, *space]`` and input ``[n, k,
    in, *space]``; returns the squares of what each sample has of them, and of both: ``[3, n, parts]`` in float64."""
    if settings.transposed:  # it is g that has windows, at the positions of the input
        return rows(input, g, kernel, settings._replace(transposed=False), out)
    large, groups = _large_groups(kernel, settings), settings.groups
    g, input, shape = as_images(g, input, kernel, settings)
    if large:  # of each group
        parts = parts_of(len(g) * groups, shape.outs, g[0].numel() // groups * g.element_size())
    else:
        parts = -(-groups // LANES)
    sums = torch.empty(3, len(g), groups * parts if large else parts, dtype=torch.float64)
    kernel_in_c = "window_rows" if large else "depthwise_rows"
    KERNELS.call(kernel_in_c, g, g.stride(), input, input.stride(), ctypes.byref(shape), out, sums, parts)
    return sums


def as_images(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> tuple[Tensor, Tensor, Shape]:
    """``[n, k, channels, rows, columns]`` of both, a row of pixels as an image, and their sizes."""
    stride, padding, dilation = (list(each) for each in settings[:3])
    if len(kernel) == 3:
        g, input, kernel = g.unsqueeze(3), input.unsqueeze(3), (*kernel[:2], 1, kernel[2])
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    groups, (outs, channels) = settings.groups, kernel[:2]
    shape = Shape(samples=len(g), images=g.shape[1], outs=outs // groups, channels=channels, groups=groups)
    shape.out_rows, shape.out_columns = g.shape[3:]
    shape.rows, shape.columns = input.shape[3:]
    shape.kernel_rows, shape.kernel_columns = kernel[2:]
    shape.row_stride, shape.column_stride = stride
    shape.row_padding, shape.column_padding = padding
    shape.row_dilation, shape.column_dilation = dilation
    return g, input, shape


def norms(g: Tensor, sums: Tensor, relative: float) -> tuple[Tensor, Doubtful]:
    """Norms and bounds ``[2, n]`` of what `rows` found.

    They may be off by ``relative`` of the product of the norms of g and of the input.
    """
    return norms_of_kernel(g, partial(KERNELS.call, "window_norms", sums, *sums.shape[1:], relative))
