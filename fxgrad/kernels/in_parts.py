"""Products for each sample whose long sums are added in parts.

A GPU's library adds up a whole row of products one after another, where a CPU's adds blocks. In parts of at most
`CHAIN` products rounding stays what the bounds count (norms.py). Many small parts keep a GPU busy, too, where a few
samples of few positions each would not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.kernels.norms import CHAIN, is_readable

SHORT = 128  # products in a row, where a matrix of all positions is small
FEW = 256  # positions up to which it is

Inner = Callable[[Tensor, Tensor], Tensor]


def inner_of(value: Tensor) -> Inner:
    """Return what multiplies positions with each other on a value's device."""
    return by_library if is_readable(value) else inner


def by_library(rows: Tensor, columns: Tensor) -> Tensor:
    return rows @ columns.mT


def inner(rows: Tensor, columns: Tensor) -> Tensor:
    """``[n, k, features], [n, l, features] -> [n, k, l]``: the products of all positions with each other."""
    n, k, features = rows.shape
    parts = _parts(k, features)
    if parts == 1:
        return by_library(rows, columns)
    left = _split(rows, parts)
    right = left if columns is rows else _split(columns, parts)  # a compiler would copy it twice
    products = by_library(left, right).view(n, parts, k, columns.shape[1])
    return products.sum(1, dtype=torch.float64).to(rows.dtype)


def gram_elements(k: int, *features: int) -> int:
    """Return how many numbers the parts of Gram matrices of k positions are, and the factors, which are copied."""
    return sum(_parts(k, each) * k * k + k * each for each in features)


def _parts(k: int, features: int) -> int:
    if not isinstance(features, int) or features <= SHORT:
        return 1
    return -(-features // (SHORT if isinstance(k, int) and k <= FEW else CHAIN))


def _split(rows: Tensor, parts: int) -> Tensor:
    """``[n, k, features]`` as ``[n * parts, k, features of a part]``."""
    n, k, features = rows.shape
    size = -(-features // parts)
    padded = F.pad(rows, (0, parts * size - features)) if parts * size != features else rows
    return padded.reshape(n, k, parts, size).transpose(1, 2).reshape(n * parts, k, size)


def outer(g: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``[n, k, o], [n, k, i] -> [n, o, i]``: the outer products of positions, added up; ``out``: into this."""
    total, *others = (
        (g[:, start : start + CHAIN].mT, x[:, start : start + CHAIN]) for start in range(0, max(1, g.shape[1]), CHAIN)
    )
    rows = torch.bmm(*total) if out is None else torch.bmm(*total, out=out)
    for part in others:
        rows = torch.baddbmm(rows, *part) if out is None else rows.baddbmm_(*part)
    return rows
