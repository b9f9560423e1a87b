"""Sample ids: integer tensors that record the samples each element of a value depends on.

The id NONE stands for no sample, and n >= 1 for sample n alone. SUM stands for a sum of terms that depend on one sample
each, and MANY for any other dependence. A dimension with equal ids has size 1: activations ``[B, T, C]`` have ids
``[B, 1, 1]``. Ids therefore stay small for large values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NONE, SUM, MANY = 0, -1, -2

_ABOVE = torch.iinfo(torch.int32).max


def no_samples(rank: int) -> Tensor:
    """Return the ids of a value that depends on no sample."""
    return torch.zeros([1] * rank, dtype=torch.int32)


def any_samples(rank: int) -> Tensor:
    """Return the ids of a value with unknown dependence: MANY."""
    return torch.full([1] * rank, MANY, dtype=torch.int32)


def joined(*several: Tensor) -> Tensor:
    """Return the ids of an arbitrary function of several elements.

    >>> joined(torch.tensor([0, 1, 1, SUM]), torch.tensor([2, 1, 2, 0])).tolist()
    [2, 1, -2, -2]
    """
    result = _any_function(several[0])
    for ids in several[1:]:
        a, b = torch.broadcast_tensors(result, _any_function(ids))
        result = _met(a, b, MANY)
    return result


def _met(a: Tensor, b: Tensor, different: Tensor | int) -> Tensor:
    """Return ``different`` where two ids are different and neither is NONE."""
    return torch.where(a == b, a, torch.where(a == NONE, b, torch.where(b == NONE, a, different)))


def _any_function(ids: Tensor) -> Tensor:
    return torch.where(ids == SUM, MANY, ids)


def added(*several: Tensor) -> Tensor:
    """Return the ids of a sum of elements, with coefficients that depend on no sample.

    >>> added(torch.tensor([0, 1, 1, SUM]), torch.tensor([2, 1, 2, 3])).tolist()
    [2, 1, -1, -1]
    """
    result = several[0]
    for ids in several[1:]:
        a, b = torch.broadcast_tensors(result, ids)
        result = _met(a, b, torch.where((a == MANY) | (b == MANY), MANY, SUM))
    return result


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Return the ids of a product of two elements; it is linear in one if the other depends on no sample.

    >>> multiplied(torch.tensor([SUM, SUM, 1, 1]), torch.tensor([0, 1, 1, 2])).tolist()
    [-1, -2, 1, -2]
    """
    a, b = torch.broadcast_tensors(a, b)
    return torch.where(a == NONE, b, torch.where(b == NONE, a, joined(a, b)))


def folded(ids: Tensor, dims: Sequence[int], *, linear: bool = False) -> Tensor:
    """Return the ids of a reduction over dimensions, which get size 1: `added` for a sum, `joined` otherwise.

    >>> folded(torch.tensor([[1, 1], [0, 2], [1, 2]]), [1], linear=True).tolist()
    [[1], [2], [-1]]
    """
    ids = ids if linear else _any_function(ids)
    varying = [dim for dim in dims if ids.shape[dim] != 1]
    if not varying:
        return ids
    low, high = _ends(ids)
    return _between(low.amin(varying, keepdim=True), high.amax(varying, keepdim=True), linear=linear)


def added_at(rows: Tensor, places: Tensor, size: int, dim: int) -> Tensor:
    """Return the ids of the sums that rows along a dimension scatter to known indices."""
    where = along_dim(places, dim, rows.dim()).expand(rows.shape)
    shape = [*rows.shape[:dim], size, *rows.shape[dim + 1 :]]
    low, high = _ends(rows)
    least = torch.full(shape, _ABOVE, dtype=rows.dtype).scatter_reduce(dim, where, low, "amin")
    most = torch.full(shape, -_ABOVE, dtype=rows.dtype).scatter_reduce(dim, where, high, "amax")
    return _between(least, most, linear=True)


def _ends(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids whose least, and ids whose largest, is that of all ids but NONE."""
    return torch.where(ids == NONE, _ABOVE, ids), torch.where(ids == NONE, -_ABOVE, ids)


def _between(least: Tensor, most: Tensor, *, linear: bool) -> Tensor:
    """Return the ids of reductions from the least and the largest id that each of them reduces."""
    met = torch.where(least == MANY, MANY, SUM) if linear else MANY
    return torch.where(least > most, NONE, torch.where(least == most, least, met)).to(torch.int32)


def whole(ids: Tensor) -> Tensor:
    """Return the one id of an arbitrary function of all elements, without dimensions."""
    return folded(ids, range(ids.dim())).reshape([])


def total(ids: Tensor) -> Tensor:
    """Return the one id of the sum of all elements, without dimensions."""
    return folded(ids, range(ids.dim()), linear=True).reshape([])


def chosen(ids: Tensor, which: Tensor) -> Tensor:
    """Return the ids of elements that an index or a mask chooses; one without samples changes nothing."""
    return joined(ids, which) if bool(which.any()) else ids


def along_dim(ids: Tensor, dim: int, rank: int) -> Tensor:
    """Return a row of ids as the ids of a value of this rank, along one dimension."""
    return ids.reshape([-1 if d == dim else 1 for d in range(rank)])


def compact(ids: Tensor) -> Tensor:
    """Return the same ids, with size 1 along each dimension in which they are constant."""
    for dim, size in enumerate(ids.shape):
        if size > 1:
            first = ids.narrow(dim, 0, 1)
            if ids.stride(dim) == 0 or bool((ids == first).all()):
                ids = first
        elif size == 0:
            return no_samples(ids.dim())
    return ids


def regrouped(ids: Tensor, shape: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return the ids of ``value.view(new)`` for a value of shape ``shape``.

    >>> regrouped(torch.tensor([[1], [2]]), [2, 3], [6]).tolist()
    [1, 1, 1, 2, 2, 2]
    """
    if 0 in shape:
        return (folded(ids, range(ids.dim())) if ids.numel() else ids.new_zeros(1)).reshape([1] * len(new))
    full, split = list(ids.shape), list(new)
    for old_dims, new_dims in _groups(shape, new):
        if all(ids.shape[dim] == 1 for dim in old_dims):
            for dim in new_dims:
                split[dim] = 1
        else:
            for dim in old_dims:
                full[dim] = shape[dim]
    return compact(ids.expand(full).reshape(split))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of adjacent dimensions with equal element counts before and after a view."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        before: list[int] = []
        after: list[int] = []
        p = q = 1
        while (not before and not after) or p != q:
            if i < len(old) and (p <= q or j == len(new)):
                before.append(i)
                p, i = p * old[i], i + 1
            else:
                after.append(j)
                q, j = q * new[j], j + 1
        groups.append((before, after))
    return groups
