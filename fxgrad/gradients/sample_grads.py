"""The per-sample gradients of one parameter, as the sum of parts that were not multiplied out.

A quantity asks for what it needs: the gradients themselves, their norms, a weighted sum over samples, their
products with a given tensor. Each is computed from the parts in the way that `fxgrad.costs.choices` chose.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fxgrad.costs.choices import Planner
from fxgrad.gradients.columns import Gram, Projection, Squares, Statistic, Variance, by_columns, by_lines
from fxgrad.gradients.parts import merged, summed
from fxgrad.kernels.norms import bounded
from fxgrad.kernels.precision import WIDE, accumulating, at_most
from fxgrad.terms import Materialised, Part, Term
from fxgrad.terms.part import Packed
from fxgrad.terms.tied import norms_of_tied
from fxgrad.terms.work import Way


@dataclass
class SampleGrads:
    """``D_n = Σ parts``: the gradients ``[n, *shape]`` of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    n: int
    like: Tensor  # any tensor on the gradients' device
    parts: list[Part] = field(default_factory=list)
    planner: Planner = field(default_factory=Planner)  # what chooses
    scale: float = 1  # D_n is this times the parts' sum: of all that is asked for, no factor is rounded for it
    lent: bool = False  # to a quantity of the user's, which may write to what it gets

    @property
    def accumulating(self) -> torch.dtype:
        """Return the dtype that norms and sums are taken in."""
        return accumulating(self.dtype)

    def dense(self) -> Tensor:
        """``[n, *shape]``"""
        if not self.parts:
            return self.like.new_zeros(self.n, *self.shape, dtype=self.dtype)
        rows = self._scaled(summed(self.parts).reshape(self.n, *self.shape))
        return rows.clone() if self.lent else rows

    def grouped(self, size: int) -> SampleGrads:
        """Return the same with ``size`` consecutive samples as one."""
        if size == 1:
            return self
        parts = [part.grouped(size) for part in self.parts]
        return replace(self, n=self.n // size, parts=parts, planner=self.planner.grouped(size))

    def _scaled(self, result: Tensor, times: int = 1) -> Tensor:
        return result if isinstance(self.scale, int | float) and self.scale == 1 else result * self.scale**times

    def norms(self) -> Tensor:
        """``[2, n]``, in float64: the norms, and bounds that hold for the gradients in exact arithmetic."""
        norms = self._scaled(self._norms())
        return norms.clone() if self.lent else norms

    def _norms(self) -> Tensor:
        parts = merged(self.parts)
        if not parts:
            return self.like.new_zeros(2, self.n, dtype=torch.float64)
        if len(parts) == 1:
            return parts[0].norms(self._way)
        tied = norms_of_tied(parts, self._way)
        if tied is not None:
            return tied
        self.planner.multiplied_out(self.name)
        if all(part.isometric for part in parts):
            return Materialised.merged(parts).norms(self._way)
        rows = summed(self.parts, wide=True)
        rounding = [part.rounding() for part in parts if not part.unrounded]
        return bounded(rows, sum(rounding, rows.new_zeros(self.n, dtype=torch.float64)))

    def _way(self, term: Term) -> Way:
        return self.planner.of(self.name, term, deferred=True)

    def weighted(self, c: Tensor, wide: bool = False) -> Tensor:
        """``Σ_n c_n D_n``, ``[*shape]``, in the parameter's dtype; ``wide``: in float64, on its way to one."""
        dtype = WIDE.get(self.dtype, self.dtype) if wide else self.dtype
        isometric = all(part.isometric for part in self.parts)
        total: Tensor | None = None
        c = self._scaled(at_most(c, self.accumulating.to_real()))
        onednn = self.planner.machine.onednn_pays()
        for part in merged(self.parts):
            sums = part.weighted(c, wide or not isometric, onednn)
            sums = sums if sums.shape == self.shape else sums.reshape(self.shape)
            total = sums if total is None else total + sums
        if total is None:
            return self.like.new_zeros(self.shape, dtype=dtype)
        if not isometric and not wide:  # of a derivative that is infinite no weight of 0 makes 0
            total = torch.where((c == 0).all(), 0, total)
        return total.to(dtype)

    def dot(self, vector: Tensor) -> Tensor:
        """``<D_n, vector>`` of a tensor ``[*shape]``: ``[n]``."""
        dots = [part.dot(vector.to(self.accumulating)) for part in merged(self.parts)]
        if not dots:
            return self.like.new_zeros(self.n, dtype=self.accumulating)
        return self._scaled(torch.stack(dots).sum(0))

    def squared(self) -> Tensor:
        """``Σ_n D_n²``, element by element, ``[*shape]``."""
        return self._scaled(self._by_columns(Squares()).reshape(self.shape), 2)

    def variance(self) -> Tensor:
        """Return the unbiased variance over samples, element by element, ``[*shape]``."""
        return self._scaled(self._by_columns(Variance()).reshape(self.shape), 2)

    def gram(self) -> Tensor:
        """``<D_n, D_m>``, ``[n, n]``."""
        return self._scaled(self._by_columns(Gram()), 2)

    def packed(self) -> tuple[Packed, list[int], Tensor]:
        """Return the parts, of which there are some, as lines: packed, how many and of what width; and the scale."""
        readable, lines = by_lines(merged(self.parts))
        scale = torch.ones((), dtype=self.accumulating, device=self.like.device) * self.scale
        return Packed.of(readable, self.accumulating), lines, scale

    def projected(self, dim: int, seed: int, key: int) -> Tensor:
        """Return the product with a matrix of signs that (seed, key) names, ``[n, dim]``."""
        return self._scaled(self._by_columns(Projection(dim, seed, key)))

    def _by_columns(self, statistic: Statistic) -> Tensor:
        parts = merged(self.parts) or [Materialised(self.dense())]
        return by_columns(parts, statistic, self.accumulating)


def deferred(part: Part, name: str, planner: Planner) -> Part:
    """Return a part of one parameter as it is kept to the end of the backward: as factors, or multiplied out."""
    if isinstance(part, Term) and planner.of(name, part) is Way.MATERIALISE:
        return part.materialised()
    return part
