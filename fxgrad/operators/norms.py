"""Norms of per-sample gradients, without building them, and a bound on what rounding may have hidden.

    product    D_n = Σ_k g_nk ⊗ x_nk     Gram: ‖D_n‖² = Σ_kl (g_k·g_l)(x_k·x_l), or D itself, a few samples at a time
    windows    D_n of a convolution, by its native kernel, a few samples at a time; or its windows' Gram matrix

Every operator returns ``[2, n]`` in float64: the norms, and upper bounds that hold for the gradients in exact
arithmetic. A sum of m products in a dtype of unit roundoff u errs by at most γ(m) Σ|products|, whatever its order
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); kernels add blocks of at most `CHAIN`
products, and then the blocks. Where float32 overflows or loses a sample to underflow, that sample is computed
again in float64, scaled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxgrad.operators import product_kernel, window_kernel
from fxgrad.operators.convolutions import CACHED, Settings, blocks, conv_rows
from fxgrad.operators.kernels import ANY_LAYOUT
from fxgrad.operators.memory import fresh
from fxgrad.precision import computable

CHAIN = 512  # products that a kernel adds one after another, at most
BLOCK = 1 << 20  # bytes of gradients that are looked at together: they stay in the cache
TINY = 1e-30  # norms below this may have lost digits to underflow on the way
SMALL = 1e-12  # likewise, where squares are summed in float32


def gamma(m: int, dtype: torch.dtype) -> float:
    """The relative error of a sum of m products, at most."""
    chain = m if m <= CHAIN else CHAIN + m / CHAIN
    return (chain + 2) * torch.finfo(dtype).eps / 2


def frobenius(rows: Tensor) -> Tensor:
    """‖rows_n‖ in float64, ``[n]``: no finite value over- or underflows on the way."""
    rows = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
    flat = as_vectors(rows).double()
    if rows.dtype != torch.float64 or flat.shape[1] == 0:
        return flat.square().sum(1).sqrt()
    scale = flat.abs().amax(1, keepdim=True)
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    return (flat / safe).square().sum(1).sqrt() * safe.squeeze(1)


def quick_frobenius(rows: Tensor) -> Tensor:
    """The same outside of a traced graph, off by γ(CHAIN) at most: squares are summed in float32, `CHAIN` at a time."""
    if rows.dtype is not torch.float32:
        return frobenius(rows)
    dims = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)  # as they lie in memory: nothing is copied
    flat = as_vectors(rows.permute(0, *dims))
    whole = flat.shape[1] // CHAIN * CHAIN
    parts = [torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, CHAIN)), dim=2)] if whole else []
    if whole < flat.shape[1] or not whole:
        parts.append(torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True))
    norms = torch.cat(parts, 1).double().square().sum(1).sqrt()
    doubtful = ~norms.isfinite() | (norms < SMALL)
    if bool(doubtful.any()):
        norms[doubtful] = frobenius(rows[doubtful])
    return norms


def as_vectors(rows: Tensor) -> Tensor:
    """``[n, *shape]`` as ``[n, elements]``, also of a 0-dim parameter's gradients ``[n]``."""
    return rows.unsqueeze(-1).flatten(1)


def root_sum_squares(norms: Tensor) -> Tensor:
    """``[m, n] -> [n]``: √Σ_m norms², scaled so that no finite result overflows."""
    scale = norms.amax(0)
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    return (norms / safe).square().sum(0).sqrt() * safe


def rank_one_norms(g: Tensor, x: Tensor) -> Tensor:
    """‖g_n ⊗ x_n‖ = ‖g_n‖ ‖x_n‖ of ``[n, o]`` and ``[n, i]``."""
    norms = frobenius(g) * frobenius(x)
    return torch.stack([norms, norms * (1 + 1e-12)])


@torch.library.custom_op("fxgrad::product_norms", mutates_args=(), tags=ANY_LAYOUT)
def product_norms(g: Tensor, x: Tensor, gram: bool) -> Tensor:
    """``‖Σ_k g[n, k, o] x[n, k, i]‖`` and its bound."""
    g, x = computable(g), computable(x)
    (n, k, o), i = g.shape, x.shape[2]

    def carefully(row: int) -> Tensor:
        return _carefully(g[row], x[row])

    if not gram and product_kernel.applies(g, x):
        found, doubtful = _products_by_kernel(g, x, None)
        return _again(found, doubtful, carefully)
    size = (k * k * 2 if gram else o * i) * g.element_size()
    of_rows = _gram_norms if gram else _product_rows_norms
    return _by_blocks(_slices(n, size), lambda rows: of_rows(g[rows], x[rows]), carefully)


@product_norms.register_fake
def _(g: Tensor, x: Tensor, gram: bool) -> Tensor:
    return g.new_empty((2, g.shape[0]), dtype=torch.float64)


def _gram_norms(g: Tensor, x: Tensor) -> Tensor:
    """‖D_n‖² = Σ_kl (g_k·g_l)(x_k·x_l); of a long sequence's symmetric matrices, the lower left quarter is left out."""
    n, k = g.shape[:2]
    if k % 2 or k < 32:
        square, slack = _met(g @ g.mT, x @ x.mT, g.shape[2], x.shape[2])
        return _from_squares(square, slack)
    halves = [side.reshape(n, 2, k // 2, -1) for side in (g, x)]
    by_g, by_x = (half.flatten(0, 1) @ half.flatten(0, 1).mT for half in halves)
    of_g, of_x = (_own_lengths(gram)[0].view(n, 2, k // 2, 1) for gram in (by_g, by_x))
    own = _met(by_g, by_x, g.shape[2], x.shape[2])
    by_g, by_x = (half[:, 0] @ half[:, 1].mT for half in halves)
    across = (of_g[:, 0], of_g[:, 1]), (of_x[:, 0], of_x[:, 1])
    other = _met(by_g, by_x, g.shape[2], x.shape[2], *across)
    return _from_squares(*(one.view(n, 2).sum(1) + 2 * two for one, two in zip(own, other, strict=True)))


Lengths = tuple[Tensor, Tensor]  # ‖g_k‖ of the rows of a Gram matrix and of its columns, [n, k, 1]


def _met(
    by_g: Tensor, by_x: Tensor, o: int, i: int, of_g: Lengths | None = None, of_x: Lengths | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_kl of the products of two Gram matrices, of vectors of o and i elements, and how far rounding may be off."""
    of_g, of_x = of_g or _own_lengths(by_g), of_x or _own_lengths(by_x)
    products = by_g * by_x
    square = products.sum((1, 2), dtype=torch.float64)
    slack = (
        gamma(o, by_g.dtype) * _quadratic(of_g[0], by_x.abs_(), of_g[1])
        + gamma(i, by_x.dtype) * _quadratic(of_x[0], by_g.abs_(), of_x[1])
        + gamma(1, by_g.dtype) * products.abs_().sum((1, 2), dtype=torch.float64)
    )
    return square, 1.01 * slack


def _own_lengths(gram: Tensor) -> Lengths:
    lengths = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().unsqueeze(2)
    return lengths, lengths


def _quadratic(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """leftᵀ M right for each sample."""
    return ((matrix @ right) * left).sum((1, 2), dtype=torch.float64)


def _from_squares(square: Tensor, slack: Tensor) -> Tensor:
    square = square.clamp(min=0)
    return torch.stack([square.sqrt(), (square + slack).sqrt() * (1 + 1e-12)])


def _product_rows_norms(g: Tensor, x: Tensor) -> Tensor:
    return measured(g.mT @ x, product_rounding(g, x, quick_frobenius))


Norm = Callable[[Tensor], Tensor]


def product_rounding(g: Tensor, x: Tensor, norm: Norm = frobenius) -> Tensor:
    """How far the norm of ``Σ_k g_nk ⊗ x_nk`` may be from the one in exact arithmetic: γ Σ_k ‖g_nk‖ ‖x_nk‖."""
    n, k = g.shape[:2]
    lengths = (norm(g.flatten(0, 1)) * norm(x.flatten(0, 1))).view(n, k)
    return 1.001 * gamma(k, g.dtype) * lengths.sum(1)


def window_rounding(of_g: Tensor, of_input: Tensor, positions: int, copies: int, dtype: torch.dtype) -> Tensor:
    """The same of a convolution, from the norms ``[n]``; every entry of the input is in ``copies`` windows at most."""
    return of_g * of_input * (1.001 * gamma(positions, dtype) * math.sqrt(copies))


def measured(rows: Tensor, rounding: Tensor) -> Tensor:
    """`bounded`, outside of a traced graph."""
    return _quickly_bounded(quick_frobenius(rows), rounding, rows.dtype)


def _quickly_bounded(norms: Tensor, rounding: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack([norms, norms * (1 + gamma(CHAIN, dtype)) + rounding])


@torch.library.custom_op("fxgrad::product_rows", mutates_args=(), tags=ANY_LAYOUT)
def product_rows(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ_k g[n, k, o] x[n, k, i]`` as ``[n, o, i]``, with the norms and bounds."""
    (n, k, o), i = g.shape, x.shape[2]
    out = fresh(g, (n, o, i))
    if product_kernel.applies(g, x):
        found, doubtful = _products_by_kernel(g, x, out)
        if bool(doubtful.any()):
            rounding = product_rounding(g[doubtful], x[doubtful], quick_frobenius)
            found[:, doubtful] = measured(out[doubtful], rounding)
        return out, found
    found = torch.empty(2, n, dtype=torch.float64, device=g.device)
    size = max(2, CACHED // max(1, (k * o + k * i + o * i) * g.element_size())) if g.device.type == "cpu" else max(n, 1)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        torch.bmm(g[rows].mT, x[rows], out=out[rows])
        found[:, rows] = measured(out[rows], product_rounding(g[rows], x[rows], quick_frobenius))
    return out, found


@product_rows.register_fake
def _(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape[0], g.shape[2], x.shape[2]), g.new_empty((2, g.shape[0]), dtype=torch.float64)


def _products_by_kernel(g: Tensor, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Norms and bounds of what our own kernel computes, and which of them float32's range may have spoilt."""
    squares, lengths = product_kernel.rows(g, x, out)
    norms = squares.sqrt()
    doubtful = ~norms.isfinite() | ~lengths.isfinite() | (norms < SMALL)
    return _quickly_bounded(norms, lengths * (1.001 * gamma(g.shape[1], g.dtype)), g.dtype), doubtful


def bounded(rows: Tensor, rounding: Tensor) -> Tensor:
    """Norms of gradients as they were computed, and bounds of what they were before rounding."""
    norms = frobenius(rows)
    return torch.stack([norms, norms * (1 + 1e-12) + rounding])


def _carefully(g: Tensor, x: Tensor) -> Tensor:
    """One sample in float64; what is finite in g's dtype has a finite norm here."""
    g, x = g.double(), x.double()
    return _product_rows_norms(g.unsqueeze(0), x.unsqueeze(0))


@torch.library.custom_op("fxgrad::window_rows", mutates_args=(), tags=ANY_LAYOUT)
def window_rows(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A convolution's per-sample weight gradients, with their norms and bounds."""
    out = fresh(g, (len(g), *kernel))
    settings = Settings.of(numbers)

    def look(rows: slice | Tensor) -> Tensor:
        return _norms_of_windows(out[rows], g[rows], input[rows], settings)

    if window_kernel.applies(g, input, kernel, settings):
        found, doubtful = _by_kernel(g, input, kernel, settings, out)
        if bool(doubtful.any()):
            found[:, doubtful] = look(doubtful)
        return out, found
    found = torch.empty(2, len(g), dtype=torch.float64, device=g.device)
    for rows in blocks(g, input, kernel):
        conv_rows(g[rows], input[rows], kernel, settings, out[rows])
        found[:, rows] = look(rows)
    return out, found


@window_rows.register_fake
def _(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape[0], *kernel), g.new_empty((2, g.shape[0]), dtype=torch.float64)


def _norms_of_windows(grads: Tensor, g: Tensor, input: Tensor, settings: Settings) -> Tensor:
    terms = _terms_of_windows(g, input, grads.shape[1:], settings)
    return measured(grads, window_rounding(quick_frobenius(g), quick_frobenius(input), *terms, g.dtype))


def _by_kernel(
    g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Norms and bounds of what our own kernel computes, and which of them float32's range may have spoilt."""
    norms = window_kernel.rows(g, input, kernel, settings, out).sqrt()
    doubtful = ~norms.isfinite().all(0) | (norms < SMALL).any(0)
    terms = _terms_of_windows(g, input, kernel, settings)
    return _quickly_bounded(norms[0], window_rounding(norms[1], norms[2], *terms, g.dtype), g.dtype), doubtful


def _terms_of_windows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> tuple[int, int]:
    """How many products an entry of the weight's gradient adds up, and how often an entry of the input is met."""
    positions = math.prod((input if settings.transposed else g).shape[3:]) * g.shape[1]
    return positions, math.prod(kernel[2:])


@torch.library.custom_op("fxgrad::window_norms", mutates_args=(), tags=ANY_LAYOUT)
def window_norms(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int], gram: bool) -> Tensor:
    """The norms of a convolution's per-sample weight gradients, and their bounds."""
    g, input = computable(g), computable(input)
    settings = Settings.of(numbers)

    def of(g: Tensor, input: Tensor) -> Tensor:
        grads = g.new_empty(len(g), *kernel)
        conv_rows(g, input, kernel, settings, grads)
        return _norms_of_windows(grads, g, input, settings)

    def carefully(row: int) -> Tensor:
        return of(g[row : row + 1].double(), input[row : row + 1].double())

    if not gram and window_kernel.applies(g, input, kernel, settings):
        found, doubtful = _by_kernel(g, input, kernel, settings, None)
        return _again(found, doubtful, carefully)
    if not gram:
        return _by_blocks(blocks(g, input, kernel), lambda rows: of(g[rows], input[rows]), carefully)

    def by_gram(rows: slice) -> Tensor:
        by_g = _pixels(g[rows]).mT @ _pixels(g[rows])
        by_x = window_gram(input[rows].flatten(0, 1), g.shape[3:], kernel[2:], settings)
        return _from_squares(*_met(by_g, by_x, g.shape[2], input.shape[2] * math.prod(kernel[2:])))

    pixels, windows = math.prod(input.shape[3:]), math.prod(g.shape[3:])
    size = max(pixels * pixels, windows * windows) * g.element_size()
    return _by_blocks(_slices(len(g), size), by_gram, carefully)


def _pixels(rows: Tensor) -> Tensor:
    """``[n, 1, channels, *space]`` as ``[n, channels, pixels]``."""
    return rows.flatten(0, 1).flatten(2)


def window_gram(input: Tensor, out: Sequence[int], kernel: Sequence[int], settings: Settings) -> Tensor:
    """The products of all windows of ``[n, channels, *space]`` with each other: ``[n, windows, windows]``.

    ``<patch_k, patch_l> = Σ_shift <pixel_(k + shift), pixel_(l + shift)>``: the pixels' Gram matrix, added up over
    the shifts inside the kernel. No patch is ever built (Rochette et al. 2019 build them).
    """
    sizes = tuple(input.shape[2:])
    flat = input.flatten(2)
    pixels = (flat.mT @ flat).view(len(input), *sizes, *sizes)
    stride, padding, dilation, *_ = settings
    total = pixels.new_zeros(len(input), *out, *out)
    for shift in itertools.product(*(range(size) for size in kernel)):
        cuts = [
            _inside(s * d - p, step, size, o)
            for s, d, p, step, size, o in zip(shift, dilation, padding, stride, sizes, out, strict=True)
        ]
        windows, seen = zip(*cuts, strict=True)
        total[(slice(None), *windows, *windows)] += pixels[(slice(None), *seen, *seen)]
    return total.view(len(input), math.prod(out), math.prod(out))


def _inside(start: int, step: int, size: int, out: int) -> tuple[slice, slice]:
    """The windows whose entry at ``start + step * window`` lies inside of the input, and those entries."""
    first = max(0, -(start // step))
    last = max(first, min(out, (size - 1 - start) // step + 1))
    return slice(first, last), slice(start + first * step, max(0, start + (last - 1) * step + 1), step)


@window_norms.register_fake
def _(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int], gram: bool) -> Tensor:
    return g.new_empty((2, g.shape[0]), dtype=torch.float64)


def _slices(n: int, size: int) -> list[slice]:
    """n samples, a few at a time, each of which needs ``size`` bytes."""
    block = max(2, BLOCK // max(size, 1))
    return [slice(start, start + block) for start in range(0, n, block)]


def _by_blocks(
    slices: Sequence[slice], of_rows: Callable[[slice], Tensor], carefully: Callable[[int], Tensor]
) -> Tensor:
    """A few samples at a time; those whose norm float32 could not hold, once more by themselves."""
    parts = [of_rows(rows) for rows in slices]
    found = torch.cat(parts, 1) if parts else torch.zeros(2, 0, dtype=torch.float64)
    return _again(found, ~found[1].isfinite() | (found[1] < TINY), carefully)


def _again(found: Tensor, doubtful: Tensor, carefully: Callable[[int], Tensor]) -> Tensor:
    if bool(doubtful.any()):
        for row in doubtful.nonzero().flatten().tolist():
            found[:, row] = carefully(row).flatten()
    return found
