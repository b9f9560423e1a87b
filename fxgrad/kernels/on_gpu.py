"""Operators as ops that Inductor fuses, on a GPU, where a launch costs more than what a small kernel computes.

On CPU an operator computes a few samples at a time, by kernels of our own, and looks at norms: where float32 could not
hold one, it computes that sample again. On a GPU nobody may look, and all samples are computed at once. What is left
are a few products and what is read of them once, which Inductor writes into the loops around. An operator that would
take more memory than `BLOCK_ON_GPU` at once stays one.

Norms are those of gradients in float32, or float64. One that overflows there has an infinite norm, and weight 0 in a
clipped sum. What underflows is below ``tiny`` in each product: the bounds count it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxgrad.kernels.convolutions import bytes_of_windows, grads_of_windows, is_thin
from fxgrad.kernels.gram import gram_norms
from fxgrad.kernels.in_parts import gram_elements, inner, outer
from fxgrad.kernels.norms import BLOCK_ON_GPU, bounded, by_scaling, frobenius
from fxgrad.kernels.precision import accumulating, computable
from fxgrad.kernels.products import product_rounding
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.sizes import hint
from fxgrad.kernels.sums import one_weighted, positions
from fxgrad.kernels.windows import terms_of_windows, window_rounding

aten = torch.ops.aten


class Form(NamedTuple):
    """What an operator is on a GPU, and at which arguments."""

    function: Callable[..., Any]
    fits: Callable[..., bool]


LONG = 512  # positions from which half of a Gram matrix is worth the launches for its parts

FORMS: dict[Any, Form] = {}


def form_of(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that a node's operator is on a GPU; None where it stays an operator."""
    form = FORMS.get(node.target)
    if form is None or not all(is_on_gpu(one.meta["val"]) for one in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return form.function if form.fits(*args, **kwargs) else None


def is_on_gpu(value: Any) -> bool:
    """Return whether a value is none of the CPU's: numbers are everywhere."""
    return not isinstance(value, Tensor) or value.device.type == "cuda"


Function = Callable[..., Any]


def on_gpu(fits: Callable[..., bool]) -> Callable[[Function], Function]:
    """Make a function what the operator of its name is on a GPU where ``fits`` is true of the arguments."""

    def enter(function: Function) -> Function:
        FORMS[getattr(torch.ops.fxgrad, function.__name__).default] = Form(function, fits)
        return function

    return enter


def always(*args: Any) -> bool:
    return True


def _are_numbers(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


# ----- sums of products


def _norms_fit(g: Tensor, x: Tensor, gram: bool) -> bool:
    sizes = [*g.shape[1:], *x.shape[1:]]
    if not _are_numbers(*sizes):
        return False
    k = math.prod(g.shape[1:-1])
    elements = gram_elements(k, g.shape[-1], x.shape[-1]) if gram else g.shape[-1] * x.shape[-1]
    return hint(g.shape[0]) * elements * 4 <= BLOCK_ON_GPU


@on_gpu(_norms_fit)
def product_norms(g: Tensor, x: Tensor, gram: bool) -> Tensor:
    g, x = computable(positions(g)), computable(positions(x))
    if gram:  # of squares, which overflow sooner
        return by_scaling(partial(gram_norms, inner=inner, long=LONG))(g, x)
    return bounded(outer(g, x), product_rounding(g, x) + _lost(g, g.shape[1], g.shape[2] * x.shape[2]))


def _lost(g: Tensor, terms: int, elements: int) -> float:
    """What may have underflowed in all of a gradient's elements, each of so many products."""
    return terms * math.sqrt(elements) * torch.finfo(g.dtype).tiny


@on_gpu(lambda g, x: _are_numbers(*g.shape[1:], *x.shape[1:]))
def product_rows(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    g, x = positions(g), positions(x)
    rows = outer(g, x)
    return rows, bounded(rows, product_rounding(g, x) + _lost(g, g.shape[1], g.shape[2] * x.shape[2]))


@on_gpu(lambda g, x, c, onednn: _are_numbers(*g.shape[1:], *x.shape[1:]))
def product_sum(g: Tensor, x: Tensor, c: Tensor, onednn: bool) -> Tensor:
    g, x, c = positions(g), positions(x), c.to(g.dtype)
    g, x = one_weighted(g, x, c, c == 0, g.shape[2] <= x.shape[2])
    return g.flatten(0, 1).t() @ x.flatten(0, 1)


@on_gpu(always)
def dense_sum(rows: Tensor, c: Tensor) -> Tensor:
    kind = accumulating(rows.dtype)
    c = c.to(kind).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(c == 0, 0, rows.to(kind) * c).sum(0)


# ----- convolutions


def _windows_fit(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int], gram: bool = False) -> bool:
    settings = Settings.of(numbers)
    if gram or not _are_numbers(*g.shape[1:], *input.shape[1:], *kernel):
        return False
    return is_thin(kernel, settings) or hint(g.shape[0]) * bytes_of_windows(g, input, kernel, settings) <= BLOCK_ON_GPU


@on_gpu(_windows_fit)
def window_norms(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int], gram: bool) -> Tensor:
    delivered, settings = g.dtype, Settings.of(numbers)
    g, input = computable(g), computable(input)
    return _measured(grads_of_windows(g, input, kernel, settings), g, input, settings, delivered)


@on_gpu(_windows_fit)
def window_rows(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    settings = Settings.of(numbers)
    grads = grads_of_windows(g, input, kernel, settings)
    return grads, _measured(grads, g, input, settings, g.dtype)


def _measured(grads: Tensor, g: Tensor, input: Tensor, settings: Settings, dtype: torch.dtype) -> Tensor:
    terms, copies = terms_of_windows(g, input, grads.shape[1:], settings)
    rounding = window_rounding(frobenius(g), frobenius(input), terms, copies, dtype)
    return bounded(grads, rounding + _lost(grads, math.prod(terms), math.prod(grads.shape[1:])))


@on_gpu(_windows_fit)
def conv_weight_grad(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> Tensor:
    return grads_of_windows(g, input, kernel, Settings.of(numbers))


@on_gpu(always)
def window_sum(g: Tensor, input: Tensor, c: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> Tensor:
    c = c.to(g.dtype)
    g, input = one_weighted(g, input, c, c == 0, hint(g.numel()) <= hint(input.numel()))
    weight = g.new_empty(()).expand(tuple(kernel))
    operands = g.flatten(0, 1), input.flatten(0, 1), weight, None
    grad: Tensor = aten.convolution_backward(*operands, *Settings.of(numbers), (False, True, False))[1]
    return grad.contiguous()
