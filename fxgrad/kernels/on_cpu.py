"""What takes the place of ops for which Inductor writes slow code on CPU.

Max pooling       Inductor's loop looks for each place without vectors, and its backward scatters. PyTorch's kernels
                  take a third of the time, an eighth with channels last.
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


@fusible(lambda g, out, threshold: torch.empty_like(g))
def relu_backward(g: Tensor, out: Tensor, threshold: float) -> Tensor:
    """g where ``out > threshold``, or where out is NaN; elsewhere 0."""
    return torch.where(out <= threshold, 0, g)


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

    own: Table = {
        aten.max_pool2d_with_indices.default: pooled,
        aten.max_pool2d_with_indices_backward.default: pooled_back,
        aten.threshold_backward.default: relu_backward,
    }
    return {**others, **{op: _on_cpu(function, others.get(op, _kept)) for op, function in own.items()}}


def _kept(*args: Any, **kwargs: Any) -> Any:
    """Leave the op as it is: the table says nothing about it."""
    return NotImplemented


def _on_cpu(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (function if x.device.type == "cpu" else other)(x, *args, **kwargs)

    return decomposed
