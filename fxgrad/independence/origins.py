"""Which samples an element depends on: tensors of ids in the place of values.

NONE stands for no sample, n >= 1 for sample n alone, SUM for a sum of what several samples gave, each by itself, and
MANY for anything else. A dimension along which all ids are the same has size 1, so ids stay small however large the
values are: those of activations ``[B, T, C]`` are ``[B, 1, 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NONE, SUM, MANY = 0, -1, -2

_ABOVE = torch.iinfo(torch.int32).max


def no_samples(rank: int) -> Tensor:
    """The ids of a value that holds no samples."""
    return torch.zeros([1] * rank, dtype=torch.int32)


def any_samples(rank: int) -> Tensor:
    """The ids of a value of which nothing is known."""
    return torch.full([1] * rank, MANY, dtype=torch.int32)


def joined(*several: Tensor) -> Tensor:
    """Of any function of elements: what all of them depend on.

    >>> joined(torch.tensor([0, 1, 1, SUM]), torch.tensor([2, 1, 2, 0])).tolist()
    [2, 1, -2, -2]
    """
    found = _any_function(several[0])
    for ids in several[1:]:
        a, b = torch.broadcast_tensors(found, _any_function(ids))
        found = torch.where(a == b, a, torch.where(a == NONE, b, torch.where(b == NONE, a, MANY)))
    return found


def _any_function(ids: Tensor) -> Tensor:
    return torch.where(ids == SUM, MANY, ids)


def added(*several: Tensor) -> Tensor:
    """Of a sum of elements, scaled by what holds no samples.

    >>> added(torch.tensor([0, 1, 1, SUM]), torch.tensor([2, 1, 2, 3])).tolist()
    [2, 1, -1, -1]
    """
    found = several[0]
    for ids in several[1:]:
        a, b = torch.broadcast_tensors(found, ids)
        met = torch.where((a == MANY) | (b == MANY), MANY, SUM)
        found = torch.where(a == b, a, torch.where(a == NONE, b, torch.where(b == NONE, a, met)))
    return found


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Of a product of two elements: linear in one where the other holds no samples.

    >>> multiplied(torch.tensor([SUM, SUM, 1, 1]), torch.tensor([0, 1, 1, 2])).tolist()
    [-1, -2, 1, -2]
    """
    a, b = torch.broadcast_tensors(a, b)
    return torch.where(a == NONE, b, torch.where(b == NONE, a, joined(a, b)))


def folded(ids: Tensor, dims: Sequence[int], *, linear: bool = False) -> Tensor:
    """Of what is computed along dimensions, which become 1: `added` where it is a sum of them, `joined` otherwise.

    >>> folded(torch.tensor([[1, 1], [0, 2], [1, 2]]), [1], linear=True).tolist()
    [[1], [2], [-1]]
    """
    ids = ids if linear else _any_function(ids)
    varying = [dim for dim in dims if ids.shape[dim] != 1]
    if not varying:
        return ids
    least = torch.where(ids == NONE, _ABOVE, ids).amin(varying, keepdim=True)
    most = torch.where(ids == NONE, -_ABOVE, ids).amax(varying, keepdim=True)
    met = torch.where(least == MANY, MANY, SUM) if linear else MANY
    return torch.where(least == _ABOVE, NONE, torch.where(least == most, least, met)).to(torch.int32)


def compact(ids: Tensor) -> Tensor:
    """The same ids, with size 1 along every dimension in which they do not change."""
    for dim, size in enumerate(ids.shape):
        if size > 1:
            first = ids.narrow(dim, 0, 1)
            if ids.stride(dim) == 0 or bool((ids == first).all()):
                ids = first
        elif size == 0:
            return no_samples(ids.dim())
    return ids


def regrouped(ids: Tensor, shape: Sequence[int], new: Sequence[int]) -> Tensor:
    """Ids of ``value.view(new)``, the value's shape being ``shape``.

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
    """The smallest groups of adjacent dimensions that hold the same elements before and after."""
    found = []
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
        found.append((before, after))
    return found
