"""Inner products of samples' gradients with those of other samples, both packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fxgrad.gradients.columns import ELEMENTS, multiplied_out
from fxgrad.terms.part import Packed, Readable


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
        mine, theirs = [multiplied_out(mine)], [multiplied_out(theirs)]
        count, width = count * width, 1
    n, m = len(own.tensors[0]), len(others.tensors[0])
    like = next(tensor for tensor in own.tensors if tensor.is_floating_point())
    total, step = like.new_zeros(n, m), max(1, ELEMENTS // max((n + m) * width, 1))
    for start in range(0, count, step):
        chosen = slice(start, min(start + step, count))
        rows, columns = (reduce(torch.add, [part.read(chosen, width) for part in parts]) for parts in (mine, theirs))
        total += rows @ columns.t()
    return total
