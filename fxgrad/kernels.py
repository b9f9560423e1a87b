"""The opaque operators: work that is done at run time, behind one node of the compiled graph.

Large products go into fresh memory on huge pages. The weight gradient of a convolution per sample is a
native kernel called with samples as the groups of one convolution, a few at a time on CPU and all at once
elsewhere: faster than unfolding the batch, and right for every argument a convolution takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxgrad.memory import fresh

if TYPE_CHECKING:
    from fxgrad.terms import Patches


BLOCK = 8  # samples that stand as groups in one convolution on CPU: what they read stays in the cache
LARGE = 64 << 10  # bytes of one sample's gradient from which fresh memory decides the time on CPU


def products(g: Tensor, x: Tensor) -> Tensor:
    """``Σ_k g[n, k, o] x[n, k, i]`` as ``[n, o, i]``."""
    size = g.shape[-1] * x.shape[-1] * g.element_size()
    if g.device.type == "cpu" and isinstance(size, int) and size >= LARGE:
        large: Tensor = _products(g, x)
        return large
    one_position = isinstance(g.shape[1], int) and g.shape[1] == 1
    return g.mT * x if one_position else g.mT @ x


@torch.library.custom_op("fxgrad::products", mutates_args=())
def _products(g: Tensor, x: Tensor) -> Tensor:
    out = fresh(g, (g.shape[0], g.shape[2], x.shape[2]))
    return torch.mul(g.mT, x, out=out) if g.shape[1] == 1 else torch.bmm(g.mT, x, out=out)


@_products.register_fake
def _(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[2], x.shape[2])


def conv_weight_grad(g: Tensor, patches: Patches) -> Tensor:
    """``[n, *weight.shape]`` from g ``[n, k, out, *space]`` and the windows of the input."""
    grad: Tensor = _conv_weight_grad(
        g,
        patches.input,
        patches.kernel,
        patches.stride,
        patches.padding,
        patches.dilation,
        patches.transposed,
        patches.output_padding or (0,) * len(patches.stride),
        patches.groups,
    )
    return grad


@torch.library.custom_op("fxgrad::conv_weight_grad", mutates_args=())
def _conv_weight_grad(
    g: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    n = g.shape[0]
    out = fresh(g, (n, *kernel))
    block = BLOCK if g.device.type == "cpu" else max(n, 1)
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    for start in range(0, n, block):
        rows = slice(start, start + block)
        out[rows].copy_(conv_rows(g[rows], input[rows], kernel, *settings))
    return out


def conv_rows(
    g: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """One call of the native kernel, with the samples side by side as groups: ``[n, *kernel]``."""
    n = g.shape[0]
    weight = g.new_empty(()).expand(n * kernel[0], *kernel[1:])
    settings = (stride, padding, dilation, transposed, output_padding, n * groups)
    operands = (_side_by_side(g), _side_by_side(input), weight, None)
    found: Tensor = torch.ops.aten.convolution_backward(*operands, *settings, (False, True, False))[1]
    return found.view(n, *kernel)


def _side_by_side(rows: Tensor) -> Tensor:
    """``[n, k, channels, *space]`` as ``[k, n * channels, *space]``, in plain order.

    Other strides, if only of dimensions of size 1, make the native kernel choose another memory format.
    """
    joined = rows.transpose(0, 1).flatten(1, 2)
    plain = torch.empty(joined.shape, device="meta").stride()
    return joined if joined.stride() == plain else joined.clone(memory_format=torch.contiguous_format)


@_conv_weight_grad.register_fake
def _(
    g: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    return g.new_empty(g.shape[0], *kernel)
