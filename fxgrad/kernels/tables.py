"""A table's per-sample gradients: themselves, their weighted sum, and their norms, the rows of one id added up.

In float32 on CPU by kernels of our own (tables.cpp), where there is a compiler; else PyTorch adds them up, and for
the norms the ids are sorted. PyTorch's own sum adds every number by an atomic instruction.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fxgrad.kernels.compiled import LARGEST, Library
from fxgrad.kernels.memory import ANY_LAYOUT, fresh
from fxgrad.kernels.norms import CHAIN, SMALL, bounded, frobenius, gamma, quick_frobenius
from fxgrad.kernels.precision import computable, unit
from fxgrad.kernels.sizes import hint

FEW_NUMBERS = 1 << 15  # of the rows, up to which an operator's call costs more than it gains

_READ, _WRITTEN = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4, [ctypes.c_void_p, ctypes.c_int]
KERNELS = Library(
    [Path(__file__).with_name(name) for name in ("common.cpp", "tables.cpp")],
    {
        "row_squares": _READ + _WRITTEN,
        "table_grads": [*_READ, ctypes.c_int64, ctypes.c_void_p, *_WRITTEN],
        "table_sum": [*_READ, ctypes.c_void_p, *_WRITTEN],
    },
    computes="embeddings",
)


@torch.library.custom_op("fxgrad::table_grads", mutates_args=(), tags=ANY_LAYOUT)
def table_grads(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """Of ids ``[n, k]`` and g ``[n, k, d]``: ``[n, classes, d]``."""
    out = fresh(g, (len(g), classes, g.shape[2]))
    kernels = _kernels(ids, g, classes)
    if kernels is None:
        g = without(padding_idx, ids, g)
        return out.zero_().scatter_add_(1, ids.long().unsqueeze(2).expand_as(g), g)
    _call(kernels.table_grads, ids, g, padding_idx, classes, out.data_ptr(), None)
    return out


@table_grads.register_fake
def _(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    KERNELS.start(g)
    return g.new_empty(g.shape[0], classes, g.shape[2])


@torch.library.custom_op("fxgrad::table_rows", mutates_args=(), tags=ANY_LAYOUT)
def table_rows(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The same, with norms and bounds."""
    kernels = _kernels(ids, g, classes)
    if kernels is None:
        return table_grads(ids, g, classes, padding_idx), row_norms(ids, g, classes, padding_idx)
    out, found = fresh(g, (len(g), classes, g.shape[2])), torch.empty(2, len(ids), dtype=torch.float64)
    _call(kernels.table_grads, ids, g, padding_idx, classes, out.data_ptr(), found.data_ptr())
    found, doubtful = _measured(found, g.dtype)
    if bool(doubtful.any()):  # what was found has to hold for these rows, as they were rounded
        off = rounding_of_rows(ids[doubtful].long(), g[doubtful], classes, padding_idx)
        found[:, doubtful] = torch.stack(bounded(out[doubtful], off))
    return out, found


@table_rows.register_fake
def _(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    KERNELS.start(g)
    found = g.new_empty((2, ids.shape[0]), dtype=torch.float64)
    return g.new_empty(g.shape[0], classes, g.shape[2]), found


def kernels_pay(g: Tensor) -> bool:
    """Whether rows ``[n, k, d]`` are added up by a kernel rather than by the compiler's atomic instructions."""
    return math.prod(hint(size) for size in g.shape) > FEW_NUMBERS and KERNELS.takes(g)


@torch.library.custom_op("fxgrad::table_sum", mutates_args=(), tags=ANY_LAYOUT)
def table_sum(ids: Tensor, g: Tensor, c: Tensor, classes: int, padding_idx: int) -> Tensor:
    """``Σ_nk c[n] onehot(ids[n, k]) ⊗ g[n, k, d]`` as ``[classes, d]``."""
    out = fresh(g, (classes, g.shape[2])).zero_()
    c = c.to(g.dtype).contiguous()
    kernels = _kernels(ids, g, classes)
    if kernels is None:
        scale = c.view(-1, 1, 1)
        g = without(padding_idx, ids, torch.where(scale == 0, 0, g) * scale)
        return out.index_add_(0, ids.flatten(), g.flatten(0, 1))
    _call(kernels.table_sum, ids, g, padding_idx, c.data_ptr(), out.data_ptr())
    return out


@table_sum.register_fake
def _(ids: Tensor, g: Tensor, c: Tensor, classes: int, padding_idx: int) -> Tensor:
    KERNELS.start(g)
    return g.new_empty(classes, g.shape[2])


@torch.library.custom_op("fxgrad::row_norms", mutates_args=(), tags=ANY_LAYOUT)
def row_norms(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """Of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``."""
    g = computable(g)
    kernels = KERNELS.functions if KERNELS.takes(g) and g.numel() else None
    if kernels is None or g[0].numel() * g.element_size() > LARGEST:
        return _by_sorting(ids, g, classes, padding_idx)
    found = torch.empty(2, len(ids), dtype=torch.float64)
    _call(kernels.row_squares, ids, g, padding_idx, found.data_ptr())
    found, doubtful = _measured(found, g.dtype)
    if bool(doubtful.any()):
        found[:, doubtful] = _by_sorting(ids[doubtful], g[doubtful].double(), classes, padding_idx, g.dtype)
    return found


@row_norms.register_fake
def _(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    KERNELS.start(g)
    return g.new_empty((2, ids.shape[0]), dtype=torch.float64)


def _kernels(ids: Tensor, g: Tensor, classes: int) -> ctypes.CDLL | None:
    """Those that add up rows, which trust the ids; None where PyTorch's ops do, and say what is wrong."""
    if not g.numel() or not KERNELS.takes(g):
        return None
    least, most = ids.aminmax()
    return KERNELS.functions if int(least) >= 0 and int(most) < classes else None


def rounding_of_sums(counts: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """How far sums may be off of so many rows, added one after another, whose norms add up to ``lengths``."""
    added = torch.where(counts > 1, counts, 0) * unit(dtype)  # one more than additions: rows may be off, too
    return added / (1 - added).clamp(min=0.5) * lengths


def rounding_of_rows(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """How far gradients of ids ``[n, k]`` and g ``[n, k, d]`` may be off, which any order has added up: ``[n]``."""
    each = frobenius(g.flatten(0, 1)).view(ids.shape).masked_fill(ids == padding_idx, 0)
    zeros = each.new_zeros(len(ids), classes)
    lengths, counts = (zeros.scatter_add(1, ids, numbers) for numbers in (each, torch.ones_like(each)))
    return 1.001 * frobenius(rounding_of_sums(counts, lengths, g.dtype))


def without(padding_idx: int, ids: Tensor, g: Tensor) -> Tensor:
    """Return g with zeros where the id is the padding's; a padding of -1 is no id."""
    return g if padding_idx < 0 else g.masked_fill((ids == padding_idx).unsqueeze(2), 0)


def lines_of_table(ids: Tensor, g: Tensor, padding_idx: int, chosen: slice | Tensor) -> Tensor:
    """Some lines of the gradients, in the order of their ids: ``[n, lines * d]``."""
    lines = chosen if isinstance(chosen, Tensor) else torch.arange(chosen.start, chosen.stop, device=ids.device)
    place = torch.searchsorted(lines, ids).clamp(max=len(lines) - 1)
    inside = (lines[place] == ids) & (ids != padding_idx)
    place = torch.where(inside, place, len(lines)).unsqueeze(2).expand_as(g)  # the last line is for the others
    return g.new_zeros(len(g), len(lines) + 1, g.shape[2]).scatter_add_(1, place, g)[:, :-1].flatten(1)


def _call(kernel: Callable[..., None], ids: Tensor, g: Tensor, *arguments: int | None) -> None:
    ids, g = ids.long().contiguous(), g if g.stride(2) == 1 else g.contiguous()
    steps = (ctypes.c_int64 * 2)(*g.stride()[:2])
    kernel(ids.data_ptr(), g.data_ptr(), steps, *g.shape, *arguments, torch.get_num_threads())


def _measured(found: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Norms and bounds from what a kernel found, and for which samples float32 could not hold them."""
    norms, off = found.sqrt()
    found = torch.stack([norms, norms * (1 + gamma(CHAIN, dtype)) + 1.001 * unit(dtype) * off])
    return found, ~found[1].isfinite() | (norms < SMALL)


def _by_sorting(ids: Tensor, g: Tensor, classes: int, padding_idx: int, delivered: torch.dtype | None = None) -> Tensor:
    """``[2, n]``: norms, and bounds for rows that are added up in the dtype ``delivered``, or in g's own."""
    n = len(ids)
    g = without(padding_idx, ids, g)
    sample = torch.arange(n, device=ids.device).unsqueeze(1)
    keys, places = torch.unique(ids + sample * classes, return_inverse=True)
    flat = g.flatten(0, 1)
    sums = flat.new_zeros(len(keys), flat.shape[1]).index_add_(0, places.flatten(), flat)
    each = quick_frobenius(flat)
    lengths, counts = each.new_zeros(2, len(keys))
    lengths.index_add_(0, places.flatten(), each)
    counts.index_add_(0, places.flatten(), torch.ones_like(each))
    owners = torch.div(keys, classes, rounding_mode="floor")
    norms = _by_owner(quick_frobenius(sums), owners, n, g.dtype)
    rounding = 1.001 * _by_owner(rounding_of_sums(counts, lengths, delivered or g.dtype), owners, n, g.dtype)
    return torch.stack([norms, norms * (1 + gamma(CHAIN, g.dtype)) + rounding])


def _by_owner(norms: Tensor, owners: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """√Σ norms² over what one sample owns; squares of float32's numbers are float64's, others are scaled."""
    if dtype is torch.float32:
        return norms.new_zeros(n).index_add_(0, owners, norms.square()).sqrt()
    scale = norms.new_zeros(n).scatter_reduce_(0, owners, norms, "amax")
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    squares = (norms / safe[owners]).square()
    return safe * norms.new_zeros(n).index_add_(0, owners, squares).sqrt()
