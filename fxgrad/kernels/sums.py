"""Weighted sums over samples, ``Σ_n c_n D_n``: for the price of an ordinary weight gradient.

A sample of weight 0 counts for nothing, also where its gradient holds Inf or NaN (0 * NaN is NaN).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fxgrad.kernels.fusible import fusible
from fxgrad.kernels.norms import CHAIN, bounded, frobenius, is_readable, norms_like
from fxgrad.kernels.onednn import outer_products
from fxgrad.kernels.operators import ANY_LAYOUT, operator
from fxgrad.kernels.precision import accumulating
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.sizes import hint

SMALL = 1 << 12  # elements of one sample's part up to which a sum is left to the compiler, which fuses it
FEW_PRODUCTS = 8 << 20  # of a sum, up to which an operator's call costs more than a faster library gains
FEW_FACTORS = 1 << 17  # elements of a side, up to which it costs more than one more copy of them
FEW_LOOPED = 1 << 16  # products of a sum, up to which a loop is faster than a copy and a library's call


def positions(factor: Tensor) -> Tensor:
    """``[n, k.., features]`` with the positions as one dimension."""
    if factor.dim() == 3:
        return factor
    return factor.unsqueeze(1) if factor.dim() == 2 else factor.flatten(1, -2)


def nothing(c: Tensor) -> Tensor | None:
    """``[n]``: the samples of weight 0; None where it is seen that there are none."""
    return None if is_readable(c) and bool(c.all()) else c == 0


def without(rows: Tensor, none: Tensor | None) -> Tensor:
    """``rows`` with zeros for those samples."""
    return rows if none is None else rows.masked_fill(none.view(-1, *[1] * (rows.dim() - 1)), 0)


def weighted(rows: Tensor, c: Tensor, none: Tensor | None) -> Tensor:
    """``c_n rows_n``"""
    return without(rows, none) * c.view(-1, *[1] * (rows.dim() - 1))


def one_weighted(g: Tensor, x: Tensor, c: Tensor, none: Tensor | None, is_g: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of ``c_n g_n ⊗ x_n``, with zeros for those samples; g is multiplied, or x."""
    if is_g:
        return weighted(g, c, none), without(x, none)
    return without(g, none), weighted(x, c, none)


@operator(lambda g, x, c, onednn: g.new_empty(g.shape[-1], x.shape[-1]), ANY_LAYOUT)
def product_sum(g: Tensor, x: Tensor, c: Tensor, onednn: bool) -> Tensor:
    """``Σ_nk c[n] g[n, k.., o] x[n, k.., i]`` as ``[o, i]``; what is copied anyway is multiplied, or the smaller."""
    g, x, c = positions(g), positions(x), c.to(g.dtype)
    none = nothing(c)
    return _joined_products(without(g, none), without(x, none), onednn, c.unsqueeze(1).expand(g.shape[:2]))


def _joined_products(g: Tensor, x: Tensor, onednn: bool, c: Tensor | None = None) -> Tensor:
    """``Σ_nk c[n, k] g[n, k, o] x[n, k, i]``"""
    if x.stride(0) < x.stride(1):  # time first: rows are joined in the order they lie in memory
        g, x, c = g.transpose(0, 1), x.transpose(0, 1), None if c is None else c.t()
    return outer_products(g.flatten(0, 1), x.flatten(0, 1), None if c is None else c.flatten(), onednn)


@fusible(lambda g, x, c, onednn: g.new_empty(g.shape[-1], x.shape[-1]))
def fused_product_sum(g: Tensor, x: Tensor, c: Tensor, onednn: bool) -> Tensor:
    """`product_sum`, where the smaller is multiplied by ops that fuse with others: the compiler may write over it."""
    g, x, c = positions(g), positions(x), c.to(g.dtype)
    if g.shape[2] <= x.shape[2]:
        return masked_product(weighted(g, c, c == 0), x, c, False, onednn)
    return masked_product(g, weighted(x, c, c == 0), c, True, onednn)


@operator(lambda g, x, c, masks_g, onednn: g.new_empty(g.shape[-1], x.shape[-1]), ANY_LAYOUT)
def masked_product(g: Tensor, x: Tensor, c: Tensor, masks_g: bool, onednn: bool) -> Tensor:
    """``Σ_nk g[n, k, o] x[n, k, i]`` of which one is weighted, and zero where c is; the other is made so."""
    none = nothing(c)
    g, x = (without(g, none), x) if masks_g else (g, without(x, none))
    return _joined_products(g, x, onednn)


@operator(lambda g, input, c, kernel, numbers: g.new_empty(*kernel), ANY_LAYOUT)
def window_sum(g: Tensor, input: Tensor, c: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """Return a convolution's weight gradient with every sample's part weighted."""
    c = c.to(g.dtype)
    g, input = one_weighted(g, input, c, nothing(c), g.numel() <= input.numel())
    operands = (g.flatten(0, 1), input.flatten(0, 1), g.new_empty(()).expand(tuple(kernel)), None)
    grad: Tensor = torch.ops.aten.convolution_backward(*operands, *Settings.of(numbers), (False, True, False))[1]
    return grad.contiguous()


@fusible(lambda rows, c: rows.new_empty(rows.shape[1:], dtype=accumulating(rows.dtype)))
def small_sum(rows: Tensor, c: Tensor) -> Tensor:
    """``Σ_n c[n] rows[n]`` of small rows, as ops that fuse with others."""
    kind = accumulating(rows.dtype)
    c = c.to(kind).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(c == 0, 0, rows.to(kind) * c).sum(0)


@fusible(lambda g, x, c: g.new_empty(g.shape[-1], x.shape[-1]))
def small_product_sum(g: Tensor, x: Tensor, c: Tensor) -> Tensor:
    """``Σ_nk c[n] g[n, k.., o] x[n, k.., i]`` as ``[o, i]``, of few products, likewise."""
    g, x = positions(g), positions(x)
    c = c.to(g.dtype).view(-1, 1, 1)
    is_looped = _is_looped(g, x)
    g, x = torch.where(c == 0, 0, g * c).flatten(0, 1), torch.where(c == 0, 0, x).flatten(0, 1)
    if not is_looped:
        return g.t() @ x
    g, x, kind = g.to(accumulating(g.dtype)), x.to(accumulating(g.dtype)), g.dtype
    return (g.unsqueeze(2) * x.unsqueeze(1)).sum(0).to(kind)


def _is_looped(g: Tensor, x: Tensor) -> bool:
    """Return whether a loop sums the products; it adds all of a sample's in a row, where a library adds blocks."""
    positions, products = g.shape[1], math.prod(map(hint, (*g.shape, x.shape[2])))
    return isinstance(positions, int) and positions <= CHAIN and products <= FEW_LOOPED


def summed_rows(rows: Tensor, c: Tensor) -> Tensor:
    """``Σ_n c[n] rows[n]``, by whichever of the two is faster."""
    if math.prod(hint(size) for size in rows.shape[1:]) <= SMALL:
        return small_sum(rows, c)
    return dense_sum(rows, c)


@operator(lambda rows, c: rows.new_empty(rows.shape[1:], dtype=accumulating(rows.dtype)), ANY_LAYOUT)
def dense_sum(rows: Tensor, c: Tensor) -> Tensor:
    """``Σ_n c[n] rows[n]``"""
    kind = accumulating(rows.dtype)
    c = c.to(kind)
    return (c @ without(rows, nothing(c)).unsqueeze(-1).flatten(1).to(kind)).view(rows.shape[1:])


@fusible(lambda ids, g, c, classes, padding_idx: g.new_empty(classes, g.shape[2]))
def small_table_sum(ids: Tensor, g: Tensor, c: Tensor, classes: int, padding_idx: int) -> Tensor:
    """``Σ_nk c[n] onehot(ids[n, k]) ⊗ g[n, k, d]`` as ``[classes, d]``, as ops that fuse with others."""
    zero = (c == 0).view(-1, 1, 1)
    g = torch.where(zero, 0, g) * c.to(g.dtype).view(-1, 1, 1)
    out: Tensor = torch.ops.aten.embedding_dense_backward(g, ids, classes, padding_idx, False)
    return out


def entry_sums(values: Sequence[Tensor], equation: str) -> Tensor:
    """Return the products of tensors of one rank, entry by entry, summed as the einsum of one operand says."""
    return torch.einsum(equation, reduce(torch.mul, values))


def _fake_measured_sums(values: Sequence[Tensor], equation: str, relative: float) -> tuple[Tensor, Tensor]:
    rows = torch.einsum(equation, values[0])
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    return rows.new_empty(rows.shape, dtype=dtype), norms_like(rows)


@fusible(_fake_measured_sums)
def measured_sums(values: Sequence[Tensor], equation: str, relative: float) -> tuple[Tensor, Tensor]:
    """`entry_sums`, which may be off by ``relative`` of the sum of absolute values; with norms and bounds."""
    rows = entry_sums(values, equation).contiguous()
    return rows, bounded(rows, relative * frobenius(entry_sums([value.abs() for value in values], equation)))
