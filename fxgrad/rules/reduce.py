"""Sums that rules share: back to a parameter's shape, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxgrad.terms import Term


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """``[n, *broadcast] -> [n, *shape]``: sum what broadcasting had repeated, but never the samples.

    >>> import torch
    >>> sum_to(torch.ones(2, 5, 3), (1, 3)).tolist()
    [[[5.0, 5.0, 5.0]], [[5.0, 5.0, 5.0]]]
    """
    n, extra = grad.shape[0], grad.dim() - 1 - len(shape)
    if extra > 0:
        grad = grad.sum(tuple(range(1, 1 + extra)))
    ones = [
        dim + 1
        for dim, size in enumerate(shape)
        if isinstance(size, int) and size == 1 and not _is_one(grad.shape[dim + 1])
    ]
    if ones:
        grad = grad.sum(ones, keepdim=True)
    return grad.reshape(n, *shape)


def _is_one(size: int) -> bool:
    return isinstance(size, int) and size == 1


def sum_positions(grad: Tensor, keep: int) -> Term:
    """``[n, k.., *shape] -> [n, *shape]`` where shape has ``keep`` dims."""
    kept = "abcdefgh"[:keep]
    return Term(f"n...{kept}->n{kept}", grad)
