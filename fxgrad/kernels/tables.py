"""A table's per-sample gradients: themselves, their weighted sum, and their norms, the rows of one id added up.

In float32 on CPU by kernels of our own (tables.cpp), where there is a compiler; else PyTorch adds them up, and for
the norms the ids are sorted. PyTorch's own sum adds every number by an atomic instruction.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.memory import fresh
from fxgrad.kernels.norms import CHAIN, bounded, frobenius, gamma, norms_like, norms_of_kernel, quick_frobenius
from fxgrad.kernels.operators import ANY_LAYOUT, operator
from fxgrad.kernels.precision import computable, unit
from fxgrad.kernels.sizes import hint

FEW_NUMBERS = 1 << 15  # of the rows, up to which an operator's call costs more than it gains

KERNELS = Library("common.cpp", "tables.cpp", computes="embeddings")


def _fake_grads(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    KERNELS.start(g)
    return g.new_empty(g.shape[0], classes, g.shape[2])


def _fake_sum(ids: Tensor, g: Tensor, c: Tensor, classes: int, padding_idx: int) -> Tensor:
    KERNELS.start(g)
    return g.new_empty(classes, g.shape[2])


def _fake_norms(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    KERNELS.start(g)
    return norms_like(g)


@operator(_fake_grads, ANY_LAYOUT)
def table_grads(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """Of ids ``[n, k]`` and g ``[n, k, d]``: ``[n, classes, d]``."""
    out = fresh(g, (len(g), classes, g.shape[2]))
    if not _kernels_add_up(ids, g, classes):
        g = without(padding_idx, ids, g)
        return out.zero_().scatter_add_(1, ids.long().unsqueeze(2).expand_as(g), g)
    _call("table_grads", ids, g, padding_idx, classes, out, None)
    return out


@operator(lambda *arguments: (_fake_grads(*arguments), _fake_norms(*arguments)), ANY_LAYOUT)
def table_rows(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Return the same, with norms and bounds."""
    if not _kernels_add_up(ids, g, classes):
        return table_grads(ids, g, classes, padding_idx), row_norms(ids, g, classes, padding_idx)
    out = fresh(g, (len(g), classes, g.shape[2]))
    norms, doubtful = norms_of_kernel(g, partial(_call, "table_grads", ids, g, padding_idx, classes, out))
    if doubtful is not None:  # the bounds have to hold for these rows, as they were rounded
        off = rounding_of_rows(ids[doubtful].long(), g[doubtful], classes, padding_idx)
        norms[:, doubtful] = bounded(out[doubtful], off)
    return out, norms


def kernels_pay(g: Tensor) -> bool:
    """Return whether rows ``[n, k, d]`` are added up by a kernel rather than by the compiler's atomic instructions."""
    return math.prod(hint(size) for size in g.shape) > FEW_NUMBERS and KERNELS.takes(g)


@operator(_fake_sum, ANY_LAYOUT)
def table_sum(ids: Tensor, g: Tensor, c: Tensor, classes: int, padding_idx: int) -> Tensor:
    """``Σ_nk c[n] onehot(ids[n, k]) ⊗ g[n, k, d]`` as ``[classes, d]``."""
    out = fresh(g, (classes, g.shape[2])).zero_()
    c = c.to(g.dtype).contiguous()
    if not _kernels_add_up(ids, g, classes):
        scale = c.view(-1, 1, 1)
        g = without(padding_idx, ids, torch.where(scale == 0, 0, g) * scale)
        return out.index_add_(0, ids.flatten(), g.flatten(0, 1))
    _call("table_sum", ids, g, padding_idx, c, out)
    return out


@operator(_fake_norms, ANY_LAYOUT)
def row_norms(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """Of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``."""
    g = computable(g)
    if not KERNELS.applies(g, copied=g.shape[1:].numel() * g.element_size()):
        return _by_sorting(ids, g, padding_idx)
    norms, doubtful = norms_of_kernel(g, partial(_call, "row_norms", ids, g, padding_idx))
    if doubtful is not None:
        norms[:, doubtful] = _by_sorting(ids[doubtful], g[doubtful].double(), padding_idx, g.dtype)
    return norms


def _kernels_add_up(ids: Tensor, g: Tensor, classes: int) -> bool:
    """Return whether kernels add up rows, which trust the ids; PyTorch's ops do not, and refuse wrong ones."""
    if not g.numel() or not KERNELS.takes(g):
        return False
    least, most = ids.aminmax()
    return int(least) >= 0 and int(most) < classes and KERNELS.functions is not None


def rounding_of_sums(counts: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far sums may be off of so many rows, added one after another, whose norms add up to ``lengths``."""
    added = torch.where(counts > 1, counts, 0) * unit(dtype)  # one more than additions: rows may be off, too
    return added / (1 - added).clamp(min=0.5) * lengths


def rounding_of_rows(ids: Tensor, g: Tensor, classes: int, padding_idx: int) -> Tensor:
    """How far gradients of ids ``[n, k]`` and g ``[n, k, d]`` may be off, which any order has added up: ``[n]``."""
    each = frobenius(g.flatten(0, 1)).view(ids.shape).masked_fill(ids == padding_idx, 0)
    zeros = each.new_zeros(ids.shape[0], classes)  # `len` would make the batch size a constant of the graph
    lengths, counts = (zeros.scatter_add(1, ids, numbers) for numbers in (each, torch.ones_like(each)))
    return 1.001 * frobenius(rounding_of_sums(counts, lengths, g.dtype))


def without(padding_idx: int, ids: Tensor, g: Tensor) -> Tensor:
    """Return g with zeros where the id is the padding's; a padding of -1 is no id."""
    return g if padding_idx < 0 else g.masked_fill((ids == padding_idx).unsqueeze(2), 0)


def lines_of_table(ids: Tensor, g: Tensor, padding_idx: int, chosen: slice | Tensor) -> Tensor:
    """Return some lines of the gradients, in the order of their ids: ``[n, lines * d]``."""
    lines = chosen if isinstance(chosen, Tensor) else torch.arange(chosen.start, chosen.stop, device=ids.device)
    place = torch.searchsorted(lines, ids).clamp(max=len(lines) - 1)
    inside = (lines[place] == ids) & (ids != padding_idx)
    place = torch.where(inside, place, len(lines)).unsqueeze(2).expand_as(g)  # the last line is for the others
    return g.new_zeros(g.shape[0], len(lines) + 1, g.shape[2]).scatter_add_(1, place, g)[:, :-1].flatten(1)


def _call(kernel: str, ids: Tensor, g: Tensor, *arguments: Tensor | int | None) -> Any:
    g = g if g.stride(2) == 1 else g.contiguous()
    return KERNELS.call(kernel, ids.long().contiguous(), g, g.stride()[:2], *g.shape, *arguments)


def _by_sorting(ids: Tensor, g: Tensor, padding_idx: int, delivered: torch.dtype | None = None) -> Tensor:
    """``[2, n]``: norms, and bounds for rows that are added up in the dtype ``delivered``, or in g's own."""
    (n, k), flat = ids.shape, without(padding_idx, ids, g).flatten(0, 1)
    found, order = ids.sort(1)
    is_next = torch.nn.functional.pad(found[:, 1:] != found[:, :-1], (min(k, 1), 0))
    ranks = order.scatter(1, order, is_next.cumsum(1))  # of each id among those of its sample
    places = (ranks + k * torch.arange(n, device=ids.device).unsqueeze(1)).flatten()
    sums = torch.zeros_like(flat).index_add_(0, places, flat)
    each = quick_frobenius(flat)
    lengths, counts = (torch.zeros_like(each).index_add_(0, places, one) for one in (each, torch.ones_like(each)))
    norms = frobenius(quick_frobenius(sums).view(n, k))
    rounding = 1.001 * frobenius(rounding_of_sums(counts, lengths, delivered or g.dtype).view(n, k))
    return torch.stack([norms, norms * (1 + gamma(CHAIN, g.dtype)) + rounding])
