"""What takes the place of ops for which Inductor writes slow code on CPU.

Max pooling       Inductor's loop looks for each place without vectors, and its backward scatters. PyTorch's kernels
                  take a third of the time, an eighth with channels last.
Replication       PyTorch's kernel for the gradient of such padding returns it laid out as the input is, where Inductor
padding           expects it contiguous. Of the input, which autograd saves, only the sizes are read.
ReLU's backward   The partitioner would save ``out <= 0``, a quarter of out's bytes. Without AVX-512 it takes Inductor
                  30 times as long to store such a mask as to store out. So the mask is hidden inside of an operator,
                  and out is saved, as eager PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.kernels.fusible import fusible
from fxgrad.kernels.operators import ANY_LAYOUT, operator
from fxgrad.kernels.precision import accumulating

aten = torch.ops.aten

Table = dict[Any, Callable[..., Any]]


def _pooled(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    values, places = aten.max_pool2d_with_indices(x, *window)
    return values, places


@operator(_pooled, ANY_LAYOUT)
def max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool
) -> tuple[Tensor, Tensor]:
    """The largest number of each window, and its place in the plane."""
    return _pooled(x, kernel, stride, padding, dilation, ceil)


def _layout(value: Tensor) -> torch.memory_format:
    return torch.channels_last if value.dim() == 4 and not value.is_contiguous() else torch.contiguous_format


def _like_input(g: Tensor, places: Tensor, height: int, width: int, *window: Any) -> Tensor:
    """Return memory for the gradient of what was pooled, laid out as the places are."""
    shape = (*g.shape[:-2], height, width)
    return torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=_layout(places))


@operator(_like_input, ANY_LAYOUT)
def max_pool_backward(
    g: Tensor,
    places: Tensor,
    height: int,
    width: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> Tensor:
    """Each window's gradient, added up at its place: ``[.., height, width]``. Of the input only its sizes are read."""
    g = g.contiguous(memory_format=_layout(places))  # PyTorch's kernel copies all else into the layout of g
    like = _like_input(g, places, height, width)
    result: Tensor = aten.max_pool2d_with_indices_backward(
        g, like, kernel, stride, padding, dilation, ceil, places.contiguous(memory_format=_layout(places))
    )
    return result


def _unpadded(g: Tensor, height: int, width: int, padding: Sequence[int]) -> Tensor:
    return g.new_empty((*g.shape[:-2], height, width))


@operator(_unpadded, ANY_LAYOUT)
def replication_pad_backward(g: Tensor, height: int, width: int, padding: Sequence[int]) -> Tensor:
    """Each edge's gradient, added up at its place: ``[.., height, width]``. Of the input only its sizes are read."""
    like = _unpadded(g, height, width, padding)
    result: Tensor = aten.replication_pad2d_backward(g.contiguous(), like, padding)
    return result


@fusible(lambda g, out, threshold: torch.empty_like(g))
def relu_backward(g: Tensor, out: Tensor, threshold: float) -> Tensor:
    """g where ``out > threshold``, or where out is NaN; elsewhere 0."""
    return torch.where(out <= threshold, 0, g)


@operator(lambda out, threshold: torch.empty_like(out, dtype=torch.uint8), ANY_LAYOUT)
def at_most(out: Tensor, threshold: float) -> Tensor:
    """1 where ``out <= threshold``, elsewhere 0, also where out is NaN: a byte each, which Inductor's loops read fast.

    A loop that reads bools takes them one by one.
    """
    return (out <= threshold).view(torch.uint8)


@fusible(lambda g, mask: torch.empty_like(g))
def kept_where(g: Tensor, mask: Tensor) -> Tensor:
    """g where a mask is 0; elsewhere 0."""
    return torch.where(mask.to(torch.float32) > 0, 0, g)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - μ) / σ w + b, μ and 1/σ: a group's variance is its channels' on average, and that of their means."""
    dtype = accumulating(x.dtype)
    per_channel = torch.var_mean(x.to(dtype).reshape(n, channels, pixels), dim=2, correction=0)
    var, mean = (one.view(n, groups, channels // groups) for one in per_channel)
    middle = _written(mean.mean(2)).unsqueeze(2)
    rstd = _written(torch.rsqrt(var.mean(2) + (mean - middle).square().mean(2) + eps)).unsqueeze(2)
    factor = rstd.expand(mean.shape) if weight is None else rstd * weight.view(groups, -1)
    shift = -middle * factor if bias is None else bias.view(groups, -1) - middle * factor
    factor, shift = (
        _written(one.reshape(n, channels)).view(n, channels, *[1] * (x.dim() - 2)) for one in (factor, shift)
    )
    out = x.to(dtype) * factor + shift
    return out.to(x.dtype), middle.squeeze(2).to(x.dtype), rstd.squeeze(2).to(x.dtype)


def _written(matrix: Tensor) -> Tensor:
    """Return the same from memory, which a loop over pixels reads: see Note [Statistics of a group]."""
    return matrix.contiguous().as_strided(matrix.shape, (matrix.shape[1], 1))


def decompositions(others: Mapping[Any, Callable[..., Any]]) -> Table:
    """Return a table of decompositions with these operators, for tensors on CPU."""

    def pooled(
        x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0, 0), dilation: Any = (1, 1), ceil: bool = False
    ) -> Any:
        return max_pool(x, kernel, stride, padding, dilation, ceil)

    def pooled_back(
        g: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, places: Tensor
    ) -> Any:
        height, width = x.shape[-2:]
        return max_pool_backward(g, places, height, width, kernel, stride, padding, dilation, ceil)

    def unpadded(g: Tensor, x: Tensor, padding: Any) -> Any:
        height, width = x.shape[-2:]
        return replication_pad_backward(g, height, width, padding)

    own: Table = {
        aten.max_pool2d_with_indices.default: pooled,
        aten.max_pool2d_with_indices_backward.default: pooled_back,
        aten.replication_pad2d_backward.default: unpadded,
        aten.threshold_backward.default: relu_backward,
        aten.native_group_norm.default: group_norm,
    }
    return {**others, **{op: _on_cpu(function, others.get(op, _kept)) for op, function in own.items()}}


def _kept(*args: Any, **kwargs: Any) -> Any:
    """Leave the op as it is: the table says nothing about it."""
    return NotImplemented


def _on_cpu(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (function if x.device.type == "cpu" else other)(x, *args, **kwargs)

    return decomposed
