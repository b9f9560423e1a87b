"""The weight gradients of a convolution for each sample, by whichever kernel is fast for the shape.

    own        a kernel in C++ for all samples, in whatever layout they are (window_kernel.py): wherever it applies
    groups     one native call in which a few samples stand side by side as groups: right for every argument a
               convolution takes, on CPU fast while a weight is small beside its positions
    windows    a few samples' windows are copied out and multiplied: on CPU for large weights at few positions, and
               for few input channels, for which oneDNN's grouped kernels are slow; on a GPU always, as cuDNN computes
               one group after the other

docs/performance.md has what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.kernels import window_kernel
from fxgrad.kernels.in_parts import outer
from fxgrad.kernels.norms import BLOCK_ON_GPU, CHAIN
from fxgrad.kernels.settings import Settings

CACHED = 4 << 20  # bytes that a block of samples reads and writes on CPU: they stay in the cache
MOST = 64  # samples in a block
FEW_POSITIONS = 64  # up to which multiplying windows beats the native kernel
FEW_COLUMNS = 64  # of a window, likewise
FEW_OUTPUTS = 2  # of a group of channels, up to which multiplying entry by entry beats a product of matrices


def blocks(g: Tensor, input: Tensor, kernel: Sequence[int]) -> list[slice]:
    """Return the samples, a few at a time: as many as stay in the CPU's cache, and more on a GPU."""
    n = len(g)
    if n == 0:
        return []
    if g.device.type == "cpu":
        floats = g[0].numel() + input[0].numel() + math.prod(kernel)
        most = min(MOST, max(2, CACHED // max(1, floats * g.element_size())))
    else:
        most = max(1, BLOCK_ON_GPU // max(1, max(g[0].numel(), input[0].numel()) * math.prod(kernel[2:]) * 4))
    size = 1 << (most.bit_length() - 1)
    return [slice(start, start + size) for start in range(0, n, size)]


def weight_grads(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings, out: Tensor) -> None:
    """``[n, *kernel]`` into contiguous ``out``, from g ``[n, k, out, *space]`` and input ``[n, k, in, *space]``."""
    if window_kernel.applies(g, input, kernel, settings):
        window_kernel.rows(g, input, kernel, settings, out)
        return
    for rows in blocks(g, input, kernel):
        conv_rows(g[rows], input[rows], kernel, settings, out[rows])


def lines_of_windows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> Tensor:
    """Return some output channels' lines of the gradients, ``[n, lines * width]``, from the g of those alone."""
    out = g.new_empty(len(g), g.shape[2], *kernel[1:])
    weight_grads(g, input, out.shape[1:], settings, out)
    return out.flatten(1)


def conv_rows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings, out: Tensor) -> None:
    """The same of a few samples, by PyTorch's kernels."""
    if g.device.type != "cpu":
        out.copy_(grads_of_windows(g, input, kernel, settings))
        return
    if settings.groups == 1 and not settings.transposed:
        positions, columns = g.shape[1] * math.prod(g.shape[3:]), math.prod(kernel[1:])
        if positions <= FEW_POSITIONS or columns <= FEW_COLUMNS:
            _by_windows(g, input, kernel, settings, out)
            return
    _by_groups(g, input, kernel, settings, out)


def _by_groups(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings, out: Tensor) -> None:
    n = g.shape[0]
    weight = g.new_empty(()).expand(n * kernel[0], *kernel[1:])
    operands = (_side_by_side(g), _side_by_side(input), weight, None)
    *others, groups = settings
    grads = torch.ops.aten.convolution_backward(*operands, *others, n * groups, (False, True, False))[1]
    out.copy_(grads.view(n, *kernel))


def _by_windows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings, out: Tensor) -> None:
    """D_n = Σ_k g_nk ⊗ window_nk"""
    n, k, channels = input.shape[:3]
    padded = input
    if any(settings.padding):
        padded = F.pad(input, [side for p in reversed(settings.padding) for side in (p, p)]).contiguous()
    steps = padded.stride()[3:]
    inside = [step * d for step, d in zip(steps, settings.dilation, strict=True)]
    along = [step * s for step, s in zip(steps, settings.stride, strict=True)]
    shape = (n, k, *g.shape[3:], channels, *kernel[2:])
    windows = padded.as_strided(shape, (*padded.stride()[:2], *along, padded.stride(2), *inside))
    # Copied with the positions last: so it is written in the order in which most of it lies in memory.
    spaces = range(2, 2 + len(kernel) - 2)
    order = (0, len(spaces) + 2, *range(len(spaces) + 3, windows.dim()), 1, *spaces)
    columns = windows.permute(order).reshape(n, math.prod(kernel[1:]), -1)
    rows = g.transpose(1, 2).reshape(n, kernel[0], -1)
    if out.is_contiguous():
        torch.bmm(rows, columns.mT, out=out.view(n, kernel[0], -1))
    else:
        out.copy_((rows @ columns.mT).view(out.shape))


def is_thin(kernel: Sequence[int], settings: Settings) -> bool:
    """Return whether a group of channels has hardly any outputs: a depthwise convolution."""
    return kernel[0] // settings.groups <= FEW_OUTPUTS and kernel[1] == 1


def grads_of_windows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> Tensor:
    """``[n, *kernel]`` from g ``[n, k, out, *space]`` and input ``[n, k, in, *space]``: D_n = Σ_k g_nk ⊗ window_nk."""
    rows, read = _roles(g, input, settings)
    n, k, outputs, *space = rows.shape
    windows = _windows(read, space, kernel[2:], settings)  # [n, k, channels, *space, *kernel]
    last = 3 + len(space)
    columns = windows.permute(0, 2, *range(last, windows.dim()), 1, *range(3, last))
    columns = columns.reshape(n, settings.groups, math.prod(kernel[1:]), k * math.prod(space))
    rows = rows.transpose(1, 2).reshape(n, settings.groups, outputs // settings.groups, k * math.prod(space))
    if is_thin(kernel, settings):
        wide = torch.float64 if rows.shape[3] > CHAIN else None
        return (rows.unsqueeze(3) * columns.unsqueeze(2)).sum(4, dtype=wide).to(g.dtype).reshape(n, *kernel)
    return outer(rows.flatten(0, 1).mT, columns.flatten(0, 1).mT).reshape(n, *kernel)


def _windows(read: Tensor, out: Sequence[int], kernel: Sequence[int], settings: Settings) -> Tensor:
    """``[n, k, channels, *space]`` as ``[n, k, channels, *out, *kernel]``: nothing is copied but for padding."""
    if any(settings.padding):
        read = F.pad(read, [side for p in reversed(settings.padding) for side in (p, p)])
    sizes = zip(out, kernel, settings.stride, settings.dilation, strict=True)
    for dim, (windows, size, stride, dilation) in enumerate(sizes, 3):
        read = read.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation].narrow(dim, 0, windows)
    return read


def bytes_of_windows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> int:
    """Return how much a sample's windows take."""
    rows, read = _roles(g, input, settings)
    size: int = rows.shape[1] * math.prod(rows.shape[3:]) * read.shape[2] * math.prod(kernel[2:]) * g.element_size()
    return size


def _roles(g: Tensor, input: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return whose entries meet windows, and whose windows these are."""
    return (input, g) if settings.transposed else (g, input)


def _side_by_side(rows: Tensor) -> Tensor:
    """``[n, k, channels, *space]`` as ``[k, n * channels, *space]``, in plain order.

    Other strides, if only of dimensions of size 1, make the native kernel choose another memory format.
    """
    joined = rows.transpose(0, 1).flatten(1, 2)
    plain = torch.empty(joined.shape, device="meta").stride()
    return joined if joined.stride() == plain else joined.clone(memory_format=torch.contiguous_format)
