"""Norms of a table's per-sample gradients: sort the ids, add up the rows of one id, square."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.operators.kernels import ANY_LAYOUT
from fxgrad.operators.norms import CHAIN, gamma, quick_frobenius
from fxgrad.precision import computable


@torch.library.custom_op("fxgrad::row_norms", mutates_args=(), tags=ANY_LAYOUT)
def row_norms(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """Of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``."""
    n, k = ids.shape
    g = computable(g)
    if padding_idx >= 0:
        g = g.masked_fill((ids == padding_idx).unsqueeze(2), 0)
    sample = torch.arange(n, device=ids.device).unsqueeze(1)
    keys, places = torch.unique(ids + sample * classes, return_inverse=True)
    flat = g.flatten(0, 1)
    sums = flat.new_zeros(len(keys), flat.shape[1]).index_add_(0, places.flatten(), flat)
    each = quick_frobenius(flat)
    lengths = each.new_zeros(len(keys)).index_add_(0, places.flatten(), each)
    owners = torch.div(keys, classes, rounding_mode="floor")
    norms = _by_owner(quick_frobenius(sums), owners, n, g.dtype)
    rounding = gamma(k, g.dtype) * _by_owner(lengths, owners, n, g.dtype)
    return torch.stack([norms, norms * (1 + gamma(CHAIN, g.dtype)) + rounding])


@row_norms.register_fake
def _(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    return g.new_empty((2, ids.shape[0]), dtype=torch.float64)


def _by_owner(norms: Tensor, owners: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """√Σ norms² over what one sample owns; squares of float32's numbers are float64's, others are scaled."""
    if dtype is torch.float32:
        return norms.new_zeros(n).index_add_(0, owners, norms.square()).sqrt()
    scale = norms.new_zeros(n).scatter_reduce_(0, owners, norms, "amax")
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    squares = (norms / safe[owners]).square()
    return safe * norms.new_zeros(n).index_add_(0, owners, squares).sqrt()
