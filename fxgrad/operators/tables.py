"""Norms of a table's per-sample gradients: the rows of one id are added up, and squared.

In float32 on CPU by a kernel of our own (tables.cpp), where there is a compiler; else the ids are sorted.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fxgrad.compiled import LARGEST, library
from fxgrad.operators.memory import ANY_LAYOUT
from fxgrad.operators.norms import CHAIN, SMALL, gamma, quick_frobenius
from fxgrad.precision import computable


@torch.library.custom_op("fxgrad::row_norms", mutates_args=(), tags=ANY_LAYOUT)
def row_norms(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """Of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``."""
    g = computable(g)
    exact = g.dtype is torch.float32 and g.device.type == "cpu"
    small = bool(g.numel()) and g[0].numel() * g.element_size() <= LARGEST
    if not exact or not small or _library() is None:
        return _by_sorting(ids, g, classes, padding_idx)
    found = _by_kernel(ids, g, padding_idx)
    doubtful = ~found[1].isfinite() | (found[0] < SMALL)
    if bool(doubtful.any()):
        found[:, doubtful] = _by_sorting(ids[doubtful], g[doubtful].double(), classes, padding_idx)
    return found


@row_norms.register_fake
def _(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    return g.new_empty((2, ids.shape[0]), dtype=torch.float64)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    sources = [Path(__file__).with_name(name) for name in ("common.cpp", "tables.cpp")]
    types = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4 + [ctypes.c_void_p, ctypes.c_int]
    return library(sources, {"row_squares": types})


def _by_kernel(ids: Tensor, g: Tensor, padding_idx: int) -> Tensor:
    kernels = _library()
    assert kernels is not None
    ids, g = ids.long().contiguous(), g if g.stride(2) == 1 else g.contiguous()
    found = torch.empty(2, len(ids), dtype=torch.float64)
    steps = (ctypes.c_int64 * 2)(*g.stride()[:2])
    shape = *g.shape, padding_idx
    kernels.row_squares(ids.data_ptr(), g.data_ptr(), steps, *shape, found.data_ptr(), torch.get_num_threads())
    norms, off = found.sqrt()
    unit = torch.finfo(g.dtype).eps / 2
    return torch.stack([norms, norms * (1 + gamma(CHAIN, g.dtype)) + 1.001 * unit * off])


def _by_sorting(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    n, k = ids.shape
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


def _by_owner(norms: Tensor, owners: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """√Σ norms² over what one sample owns; squares of float32's numbers are float64's, others are scaled."""
    if dtype is torch.float32:
        return norms.new_zeros(n).index_add_(0, owners, norms.square()).sqrt()
    scale = norms.new_zeros(n).scatter_reduce_(0, owners, norms, "amax")
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    squares = (norms / safe[owners]).square()
    return safe * norms.new_zeros(n).index_add_(0, owners, squares).sqrt()
