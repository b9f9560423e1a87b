"""Whole parameters of one unit of FSDP2, gathered where a graph first uses one of them.

    w, b = gather_unit(x, ..)     x: a value that exists just before

A compiler that may keep a value for the backward keeps none of these: it gathers again. The parameters themselves are
no arguments: they are empty there, and a compiler may copy what an operator takes (Inductor did, of a convolution's).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.kernels.handing import RECEIVERS, UNRECORDED
from fxgrad.kernels.operators import operator

# An operator takes a sequence of integers, and none of dtypes.
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


def layout_of(whole: Tensor) -> list[int]:
    """Return a parameter's dtype, number of dimensions, shape and strides as integers."""
    return [DTYPES.index(whole.dtype), whole.dim(), *whole.shape, *whole.stride()]


def _fake(after: Tensor, layouts: Sequence[int], receiver: int, unit: int, places: Sequence[int]) -> list[Tensor]:
    made, rest = [], list(layouts)
    for _ in places:
        dtype, dims, *rest = rest
        shape, strides, rest = rest[:dims], rest[dims : 2 * dims], rest[2 * dims :]
        made.append(after.new_empty_strided(shape, strides, dtype=DTYPES[dtype]))
    return made


@operator(_fake, tags=UNRECORDED)
def gather_unit(after: Tensor, layouts: Sequence[int], receiver: int, unit: int, places: Sequence[int]) -> list[Tensor]:
    """See the head of this file; returns new tensors, of these layouts one after the other."""
    made: list[Tensor] = RECEIVERS[receiver].gathers.gather(unit, places)
    return made
