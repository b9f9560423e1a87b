"""How values lie in memory, for tests of kernels that read them where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ["plain", "channels last", "strided", "samples last"]


def in_layout(value: Tensor, layout: str) -> Tensor:
    """The same values ``[n, k, channels, rows, columns]``, elsewhere in memory."""
    if layout == "channels last":
        return value.movedim(2, -1).contiguous().movedim(-1, 2)
    if layout == "samples last":
        return value.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "strided":
        wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), torch.nan)
        wide[..., ::2] = value
        return wide[..., ::2]
    return value


def expanded(value: Tensor, *dims: int) -> Tensor:
    """What is first along some dimensions, for all along these: 0 numbers apart."""
    for dim in dims:
        value = value.narrow(dim, 0, 1).expand(value.shape)
    return value
