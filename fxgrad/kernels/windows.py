"""A convolution's per-sample weight gradients with their norms, or those alone: its windows are what is multiplied.

By a kernel of our own or by PyTorch's, a few samples at a time (convolutions.py), or by the windows' Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.kernels import window_gram_kernel, window_kernel
from fxgrad.kernels.convolutions import blocks, conv_rows
from fxgrad.kernels.gram import from_squares, met, pixels_of, window_gram
from fxgrad.kernels.in_parts import inner_of
from fxgrad.kernels.memory import fresh
from fxgrad.kernels.norms import (
    CHAIN,
    Doubtful,
    again,
    by_blocks,
    gamma,
    measured,
    norms_like,
    quick_frobenius,
    slices,
)
from fxgrad.kernels.operators import ANY_LAYOUT, operator
from fxgrad.kernels.precision import computable, rounding_of_factors
from fxgrad.kernels.settings import Settings


def window_rounding(
    of_g: Tensor, of_input: Tensor, positions: Sequence[int], copies: int, dtype: torch.dtype
) -> Tensor:
    """Return how far a gradient's norm may be from the one in exact arithmetic: γ ‖g_n‖ ‖windows of input_n‖.

    From the norms ``[n]`` of g and of the input, whose entries are in ``copies`` windows at most, and the positions
    of a sample: its images, and their sizes in space.
    """
    return of_g * of_input * _relative(positions, copies, of_g.new_empty(0, dtype=dtype))


def _relative(positions: Sequence[int], copies: int, like: Tensor) -> float:
    """The same for norms of 1. Some rows of an image are added up, then those sums: our kernels have no more."""
    *images, rows, columns = (1, *positions)
    high = max(1, CHAIN // max(columns, 1))
    blocks = math.prod(images) * -(-rows // high) * -(-columns // CHAIN)
    relative = gamma(math.prod(positions), like.dtype, blocks) + rounding_of_factors(like)
    return 1.001 * relative * math.sqrt(copies)


def _fake_norms(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int], gram: bool) -> Tensor:
    (window_gram_kernel if gram else window_kernel).KERNELS.start(g)
    return norms_like(g)


def _fake_rows(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape[0], *kernel), _fake_norms(g, input, kernel, numbers, False)


@operator(_fake_rows, ANY_LAYOUT)
def window_rows(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a convolution's per-sample weight gradients, with their norms and bounds."""
    out = fresh(g, (len(g), *kernel))
    settings = Settings.of(numbers)

    def look(rows: slice | Tensor) -> Tensor:
        return _norms_of_windows(out[rows], g[rows], input[rows], settings)

    if window_kernel.applies(g, input, kernel, settings):
        norms, doubtful = _by_kernel(g, input, kernel, settings, out)
        if doubtful is not None:
            norms[:, doubtful] = look(doubtful)
        return out, norms
    norms = norms_like(g)
    for rows in blocks(g, input, kernel):
        conv_rows(g[rows], input[rows], kernel, settings, out[rows])
        norms[:, rows] = look(rows)
    return out, norms


def _norms_of_windows(
    grads: Tensor, g: Tensor, input: Tensor, settings: Settings, dtype: torch.dtype | None = None
) -> Tensor:
    """Norms, and bounds for gradients that are added up in ``dtype``, or in g's own."""
    terms = terms_of_windows(g, input, grads.shape[1:], settings)
    return measured(grads, window_rounding(quick_frobenius(g), quick_frobenius(input), *terms, dtype or g.dtype))


def _by_kernel(
    g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings, out: Tensor | None
) -> tuple[Tensor, Doubtful]:
    """Norms and bounds of what our own kernel computes."""
    sums = window_kernel.rows(g, input, kernel, settings, out)
    return window_kernel.norms(g, sums, _relative(*terms_of_windows(g, input, kernel, settings), g))


def terms_of_windows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> tuple[Sequence[int], int]:
    """The positions that an entry of the weight's gradient adds up, and how often an entry of the input is met."""
    met = input if settings.transposed else g
    return (met.shape[1], *met.shape[3:]), math.prod(kernel[2:])


@operator(_fake_norms, ANY_LAYOUT)
def window_norms(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int], gram: bool) -> Tensor:
    """Return the norms of a convolution's per-sample weight gradients, and their bounds."""
    g, input = computable(g), computable(input)
    settings, delivered = Settings.of(numbers), g.dtype

    def of(g: Tensor, input: Tensor) -> Tensor:
        grads = g.new_empty(len(g), *kernel)
        conv_rows(g, input, kernel, settings, grads)
        return _norms_of_windows(grads, g, input, settings, delivered)

    def carefully(g: Tensor, input: Tensor) -> Tensor:
        return of(g.double(), input.double())

    if not gram and window_kernel.applies(g, input, kernel, settings):
        norms, doubtful = _by_kernel(g, input, kernel, settings, None)
        return again(g, input, norms, doubtful, carefully)
    if gram and window_gram_kernel.applies(g, input, kernel):
        return again(g, input, *window_gram_kernel.norms(g, input, kernel, settings), carefully)
    if not gram:
        return by_blocks(g, input, blocks(g, input, kernel), of, carefully)

    def by_gram(g: Tensor, input: Tensor) -> Tensor:
        rows = pixels_of(g).mT
        by_g = inner_of(g)(rows, rows)
        by_x = window_gram(input.flatten(0, 1), g.shape[3:], kernel[2:], settings)
        return from_squares(*met(by_g, by_x, g.shape[2], input.shape[2] * math.prod(kernel[2:])))

    pixels, windows = math.prod(input.shape[3:]), math.prod(g.shape[3:])
    size = max(pixels * pixels, windows * windows) * g.element_size()
    return by_blocks(g, input, slices(g, size), by_gram, carefully)
