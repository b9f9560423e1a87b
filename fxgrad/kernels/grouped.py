"""The operator of routed tokens: each row times the weight of the group that it was sent to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxgrad.kernels.operators import operator


def _groups(ids: Tensor, groups: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of each group that has some; a row sent elsewhere is in none."""
    order = torch.argsort(ids, stable=True)
    known = ids[(ids >= 0) & (ids < groups)]
    start = int((ids < 0).sum())
    for group, size in enumerate(torch.bincount(known, minlength=groups).tolist()):
        if size:
            yield group, order[start : start + size]
        start += size


@operator(lambda input, g, ids, groups: input.new_empty(groups, input.shape[1], g.shape[1]))
def grouped_rows_weight(input: Tensor, g: Tensor, ids: Tensor, groups: int) -> Tensor:
    """Return the summed gradient of the weight: ``[E, I, O]``."""
    out = input.new_zeros(groups, input.shape[1], g.shape[1])
    for group, rows in _groups(ids, groups):
        out[group] = input[rows].mT @ g[rows]
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    input, weight, ids = ctx.saved_tensors
    of_input = grouped_rows(g.contiguous(), weight.mT, ids) if ctx.needs_input_grad[0] else None
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = grouped_rows_weight(input, g.contiguous(), ids, weight.shape[0])
    return of_input, of_weight, None


@operator(lambda input, weight, ids: input.new_empty(input.shape[0], weight.shape[2]), keep=_keep, backward=_backward)
def grouped_rows(input: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """``out[s] = input[s] @ weight[ids[s]]``: ``[S, I], [E, I, O], [S] -> [S, O]``; 0 for an id out of range."""
    out = input.new_zeros(input.shape[0], weight.shape[2])
    for group, rows in _groups(ids, weight.shape[0]):
        out[rows] = input[rows] @ weight[group]
    return out
