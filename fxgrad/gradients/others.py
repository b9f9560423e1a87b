"""Inner products of samples' gradients with those of other samples, both packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fxgrad.gradients.columns import ELEMENTS
from fxgrad.kernels.norms import as_vectors
from fxgrad.terms.part import Materialised, Packed, Readable


def inner_products(own: Packed, lines: Sequence[int], others: Packed, lines_of_others: Sequence[int]) -> Tensor:
    """Return ``<D_n, E_m>``, ``[n, m]``; the lines: how many a parameter has, and the elements of one."""
    mine: Sequence[Readable] = own.parts()
    theirs: Sequence[Readable] = others.parts()
    if len(mine) == len(theirs) == 1:
        from_factors = mine[0].with_others(theirs[0])
        if from_factors is not None:
            return from_factors
    count, width = lines
    if width != lines_of_others[1]:  # one of both is multiplied out, with lines of one element
        mine, theirs = ([_whole(parts)] for parts in (mine, theirs))
        count, width = count * width, 1
    samples = len(own.tensors[0]) + len(others.tensors[0])
    step = max(1, ELEMENTS // max(samples * width, 1))
    total: Tensor | int = 0
    for start in range(0, count, step):
        chosen = slice(start, min(start + step, count))
        rows, columns = (reduce(torch.add, [part.read(chosen, width) for part in parts]) for parts in (mine, theirs))
        total = total + rows @ columns.t()
    return total if isinstance(total, Tensor) else own.tensors[0].new_zeros(len(own.tensors[0]), len(others.tensors[0]))


def _whole(parts: Sequence[Readable]) -> Materialised:
    """Return parts multiplied out and added up, as vectors."""
    return Materialised(reduce(torch.add, [as_vectors(part.dense()) for part in parts]))
