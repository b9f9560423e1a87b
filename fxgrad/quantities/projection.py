"""Random projections of the per-sample gradients, as data attribution uses them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.gradients import SampleGrads
from fxgrad.norms import as_vectors
from fxgrad.quantities.base import RESULT, Delivery, Quantity, accumulating, first

BLOCK = 1 << 22  # entries of the projection that are made at once


@dataclass(frozen=True)
class GradProjection(Quantity):
    """``P g_i`` for a random sign matrix P / √dim (Johnson and Lindenstrauss; TRAK, Park et al. 2023): ``[B, dim]``.

    In ``fxgrad.result(model, quantity)``. An entry of P is a function of the seed, the parameter's name and the
    element's index alone: the same for every batch size, device and order of parameters. P is made a block at a
    time, and one parameter's gradients are held at once.

    >>> import torch, fxgrad
    >>> projection = fxgrad.GradProjection(dim=16, seed=0)
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=projection, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> tuple(fxgrad.result(model, projection).shape)
    (5, 16)
    """

    dim: int
    seed: int = 0
    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 1:
            raise OptionError(f"dim has to be a positive int, not {self.dim!r}")

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        one = first(parameters)
        return [Delivery(RESULT, None, (n, self.dim), accumulating(one.dtype), one.device)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        dtype = grads[0].accumulating
        total = grads[0].like.new_zeros(n, self.dim, dtype=dtype)
        for g in grads:
            rows = as_vectors(g.dense()).to(dtype)
            total = total + projected(rows, self.dim, self.seed, zlib.crc32(g.name.encode()))
        return [total * self.dim**-0.5]


@torch.library.custom_op("fxgrad::projected", mutates_args=())
def projected(rows: Tensor, dim: int, seed: int, key: int) -> Tensor:
    """``rows [n, elements] -> [n, dim]``: the product with a matrix of signs, made a block of elements at a time."""
    out = rows.new_zeros(rows.shape[0], dim)
    block = max(1, BLOCK // dim)
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block]
        out += part @ signs(start, part.shape[1], dim, seed, key, rows.device).to(rows.dtype)
    return out


@projected.register_fake
def _(rows: Tensor, dim: int, seed: int, key: int) -> Tensor:
    return rows.new_empty(rows.shape[0], dim)


def signs(start: int, elements: int, dim: int, seed: int, key: int, device: torch.device) -> Tensor:
    """``[elements, dim]`` of +1 and -1: one bit of a hash of (seed, key, element, column)."""
    element = torch.arange(start, start + elements, device=device).unsqueeze(1)
    column = torch.arange(dim, device=device)
    state = _mixed(torch.tensor((seed ^ key * 0x9E3779B1) & _MASK, device=device))
    state = _mixed(state ^ _mixed(element & _MASK) ^ _mixed((element >> 32) + 0x51ED270B))
    return 1 - 2 * (_mixed(state ^ _mixed(column + 0x2545F491)) & 1)


_MASK = (1 << 32) - 1


def _mixed(state: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on 32 bits, held in int64: a product wraps, and its low half is right."""
    state = state & _MASK
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)
