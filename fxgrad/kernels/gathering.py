"""Whole parameters of one unit of FSDP2, gathered where a graph first uses one of them.

    w, b = gather_unit(x, [w, b], ..)     x: a value that exists just before; the arguments w and b are empty there

A compiler that may keep a value for the backward keeps none of these: it gathers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fxgrad.kernels.handing import RECEIVERS, UNRECORDED
from fxgrad.kernels.operators import operator


def _fake(after: Tensor, wholes: Sequence[Tensor], receiver: int, unit: int, places: Sequence[int]) -> list[Tensor]:
    return [torch.empty_like(whole) for whole in wholes]


@operator(_fake, tags=UNRECORDED)
def gather_unit(
    after: Tensor, wholes: Sequence[Tensor], receiver: int, unit: int, places: Sequence[int]
) -> list[Tensor]:
    """See the head of this file; returns new tensors."""
    made: list[Tensor] = cast("Any", RECEIVERS[receiver]).gathers.gather(unit, places)
    return made
