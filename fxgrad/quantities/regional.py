"""Quantities of a model whose parameters are divided over the processes of a group, each process with every sample.

A parameter's gradient of sample n lies on the processes in one of three ways:

| kind | on process r | ‖D_n‖² |
|---|---|---|
| sharded | its own part D_n^r | Σ_r ‖D_n^r‖² |
| partial | a term D_n^r of the sum | ‖Σ_r D_n^r‖², of the sum in float64 |
| replicated | all of it | that of the first process, so that rounding is the same on all |

Norms and bounds of all parameters are gathered at once, so every process computes the same weights. Weighted sums are
linear, and stay where they are: p.grad has the parameter's own placements, or Partial ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.gradients.parts import summed
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.collectives import every_process, reduce_from_region
from fxgrad.kernels.norms import bounded, is_wide, root_sum_squares
from fxgrad.quantities.base import Quantity, values_of
from fxgrad.quantities.clipping import ClippedGrad
from fxgrad.quantities.moments import Grad
from fxgrad.quantities.samples import NormSample


@dataclass(frozen=True)
class Region:
    """A group of processes, and the parameters by the way in which their gradients lie on them; others: replicated."""

    group: str
    sharded: tuple[str, ...]
    partial: tuple[str, ...] = ()


@dataclass
class _Measured(SampleGrads):
    """Gradients whose norms are known."""

    known: Tensor | None = None  # [2, n]

    def norms(self) -> Tensor:
        assert self.known is not None
        return self.known


def _measured(grads: Sequence[SampleGrads], region: Region) -> list[SampleGrads]:
    """Return the same gradients with the norms of all processes' parts."""
    own = torch.stack([_summed_norms(g, region) if g.name in region.partial else g.norms() for g in grads])
    every = every_process(own, region.group).unbind(0)  # of each process [parameters, 2, n]
    measured: list[SampleGrads] = []
    for i, g in enumerate(grads):
        parts = [process[i] for process in every]
        norms = root_sum_squares(parts, is_wide(g.dtype)) if g.name in region.sharded else parts[0]
        measured.append(_Measured(**values_of(g), known=norms))
    return measured


def _summed_norms(g: SampleGrads, region: Region) -> Tensor:
    """Return norms and bounds of gradients whose terms lie on several processes: they are added up in float64."""
    if not g.parts:
        rows, rounding = g.like.new_zeros(g.n, 1, dtype=torch.float64), g.like.new_zeros(g.n, dtype=torch.float64)
    else:
        rows = summed(g.parts, wide=True).reshape(g.n, -1).double()
        terms = [part.rounding() for part in g.parts if not part.unrounded]
        rounding = sum(terms, rows.new_zeros(g.n))
    return bounded(reduce_from_region(rows, region.group), reduce_from_region(rounding, region.group)) * g.scale


@dataclass(frozen=True, eq=False, repr=False)
class _ClippedGrad(ClippedGrad):
    region: Region = field(default=Region("", ()), kw_only=True, repr=False)

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        return super().compute(_measured(grads, self.region), n, given)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, ClippedGrad.__name__)


@dataclass(frozen=True, eq=False, repr=False)
class _NormSample(NormSample):
    region: Region = field(default=Region("", ()), kw_only=True, repr=False)

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        return super().compute(_measured(grads, self.region), n, given)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, NormSample.__name__)


_REGIONAL: dict[type[Quantity], Any] = {ClippedGrad: _ClippedGrad, NormSample: _NormSample}


def regional(quantities: Sequence[Quantity], region: Region) -> tuple[Quantity, ...]:
    """Return what each process computes for these quantities; raise for those that are not known here."""

    def of_region(quantity: Quantity) -> Quantity:
        kind = _REGIONAL.get(type(quantity))
        if kind is not None:
            made: Quantity = kind(**values_of(quantity), region=region)
            return made
        if type(quantity) is not Grad:
            raise OptionError(
                f"{quantity} of a tensor-parallel model is not supported",
                advice="Ask for ClippedGrad, Grad or NormSample, or use DistributedDataParallel.",
            )
        return replace(quantity)

    return tuple(map(of_region, quantities))
