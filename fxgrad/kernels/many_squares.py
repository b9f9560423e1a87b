"""Sums of squares of the rows of many matrices by one operator: a compiler would allocate and write code for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.norms import sum_squares
from fxgrad.kernels.operators import operator

KERNELS = Library("common.cpp", "many_squares.cpp", computes="norms of many layers")


def _fake_squares(matrices: Sequence[Tensor]) -> Tensor:
    KERNELS.start(matrices[0])
    return matrices[0].new_empty((len(matrices), matrices[0].shape[0]), dtype=torch.float64)


@operator(_fake_squares)
def squares_of_many(matrices: Sequence[Tensor]) -> Tensor:
    """m tensors of n rows, ``[n, ..]`` -> `sum_squares` of their rows, ``[m, n]``."""
    if not KERNELS.applies(*matrices) or not all(map(_lies_in_rows, matrices)):
        return torch.stack([sum_squares(matrix) for matrix in matrices])
    many, n = len(matrices), len(matrices[0])
    squares = torch.empty(many, n, dtype=torch.float64)
    addresses = tuple(map(Tensor.data_ptr, matrices))
    widths = tuple(matrix.numel() // n for matrix in matrices)
    KERNELS.call("squares_of_rows", addresses, widths, tuple(m.stride(0) for m in matrices), many, n, squares)
    return squares


def _lies_in_rows(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix[0].is_contiguous()
