"""Virtual parameters: the gradients of a function of parameters, u = f(w, ..), on their way back to w.

f moves elements (w.t(), w.view(..))    a term of u is a term of w: the same factors, and the same norms
any other f                             D_n(w) = Jᵀ D_n(u), multiplied out where each D_n(w) itself is asked for,
                                        and in float64 for a norm; but Σ_n c_n D_n(w) = Jᵀ Σ_n c_n D_n(u):
                                        the sum is finished at u, and pulled back once, in float64, too
an autograd.Function, or a hook         its backward J may be no linear map: Σ_n c_n J(D_n(u))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxgrad.costs.choices import Planner
from fxgrad.gradients.parts import summed
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.norms import as_vectors, bounded, frobenius
from fxgrad.kernels.precision import accumulating
from fxgrad.ops.user_functions import UserFunction
from fxgrad.rules.strategies import Contributions, Strategy, matched
from fxgrad.runtime.pieces import Back, cut, traced
from fxgrad.terms import Materialised, Part, part_of
from fxgrad.terms.part import ChooseWay


class Pullback:
    """The gradients that arrived at u, and f's derivative, transposed, at the values that f saw in the forward.

    What is computed for one parameter of f is there for the others, too: functions of functions of two parameters
    would otherwise be gone through once for every path.
    """

    def __init__(self, grads: SampleGrads, back: Back, isometric: bool, linear: bool = True) -> None:
        self.grads, self.back, self.isometric, self.linear = grads, back, isometric, linear
        self._rows: dict[bool, dict[int, Tensor]] = {}
        self._sums: dict[tuple[int, bool], tuple[Tensor, dict[int, Tensor]]] = {}
        self._grouped: dict[int, Pullback] = {}

    def rows(self, slot: int, wide: bool) -> Tensor:
        """``[n, *w.shape]``; ``wide``: in float64 from u's own factors on."""
        if wide not in self._rows:
            rows = summed(self.grads.parts, wide)
            self._rows[wide] = self.back(rows.reshape(rows.shape[0], *self.grads.shape))
        return self._rows[wide][slot]

    def sums(self, c: Tensor, wide: bool) -> dict[int, Tensor]:
        """``Σ_n c_n D_n(w)`` for each w, from the finished sum at u."""
        key = id(c), wide
        if key not in self._sums:
            total = self.grads.weighted(c, wide)
            self._sums[key] = c, {slot: grad.squeeze(0) for slot, grad in self.back(total.unsqueeze(0)).items()}
        return self._sums[key][1]

    def grouped(self, size: int) -> Pullback:
        """Return the same with ``size`` consecutive samples as one."""
        if size not in self._grouped:
            self._grouped[size] = Pullback(self.grads.grouped(size), self.back, self.isometric, self.linear)
        return self._grouped[size]


@dataclass(frozen=True)
class Virtual(Part):
    """What reaches a parameter through a function of it: the gradients at the function's value, and the way back."""

    of: Pullback
    slot: int
    complex: bool

    unrounded = True

    @property
    def is_complex(self) -> bool:
        return self.complex

    @property
    def isometric(self) -> bool:
        return self.of.isometric

    def dense(self, wide: bool = False) -> Tensor:
        return self.of.rows(self.slot, wide)

    def rounding(self) -> Tensor:
        if not self.isometric:
            return frobenius(self.dense(True) - self.dense())
        return torch.stack([part.rounding() for part in self.of.grads.parts]).sum(0)

    def own_shape(self) -> tuple[int, ...]:
        return tuple(self.dense().shape[1:])

    def norms(self, way: ChooseWay) -> Tensor:
        if self.isometric:
            return self.of.grads.norms()
        rows = self.dense(True)
        return bounded(rows, rows.new_zeros(rows.shape[0], dtype=torch.float64))

    def weighted(self, c: Tensor, wide: bool, onednn: bool) -> Tensor:
        """``Σ_n c_n D_n(w)``, from the finished sum; of one sample it is there already, for its norm.

        In float64 where norms are: what rounding adds to the sum, no norm has.
        """
        grads = self.of.grads
        if not self.isometric and isinstance(grads.n, int) and grads.n == 1:
            row = self.dense(True)[0]
            return row * c.to(row.dtype.to_real() if row.is_complex() else row.dtype)
        if not self.of.linear:
            rows = self.dense(True)
            grads = replace(grads, shape=tuple(rows.shape[1:]), dtype=rows.dtype, like=rows, scale=1)
            return replace(grads, parts=[Materialised(rows)]).weighted(c, True)
        return self.of.sums(c, wide or not self.isometric)[self.slot]

    def dot(self, vector: Tensor) -> Tensor:
        """``<D_n(w), vector>``; where f moves elements, the vector is moved to u."""
        if not self.isometric:
            return as_vectors(self.dense() * vector).sum(1)
        with torch.enable_grad():
            at = vector.new_zeros(1, *self.of.grads.shape)
            moved = torch.func.vjp(lambda g: self.of.back(g)[self.slot], at)[1](vector.unsqueeze(0))[0]
        return self.of.grads.dot(moved.squeeze(0))

    def grouped(self, size: int) -> Virtual:
        return replace(self, of=self.of.grouped(size))


def pulled_back(
    strategy: Strategy,
    parts: Sequence[Part],
    values: list[Any],
    n: int,
    planner: Planner,
) -> Contributions:
    """Return the parts of u = f(w, ..) as parts of each of f's parameters, by their slots."""

    def back(rows: Tensor) -> dict[int, Tensor]:
        rows = strategy.use.as_value(rows)
        g = rows if strategy.native else rows.to(_computed_in(values, rows))
        grads: dict[int, Tensor] = {}
        for slot, part in strategy.terms(g, matched(values, g), g.shape[0]):
            grad = part_of(part).dense()
            grad = grad if values[slot].is_complex() else grad.real  # what enters both parts of a value is real
            grad = grad.to(rows.dtype.to_complex() if grad.is_complex() else rows.dtype.to_real())
            grads[slot] = grads[slot] + grad if slot in grads else grad
        return grads

    if not strategy.permutes:
        return _through(strategy, parts, values, n, planner, back)
    (slot,) = strategy.use.wrt

    def moving(rows: Tensor) -> Tensor:
        return back(rows)[slot]

    contributions: Contributions = []
    for part in parts:
        moved = part.moved(moving, lambda shape: traced((1, *shape), values, moving)[1])
        if moved is None:
            moved = Virtual(Pullback(_value([part], values, strategy, n, planner), back, True), slot, part.is_complex)
        contributions.append((slot, moved))
    return contributions


def _through(
    strategy: Strategy, parts: Sequence[Part], values: list[Any], n: int, planner: Planner, back: Back
) -> Contributions:
    """Through a function that does more than move one parameter's elements; pieces of products stay products."""
    contributions: Contributions = []
    others: list[Part] = []
    for part in parts:
        if strategy.slices and isinstance(part, Materialised):
            rows = back(part.rows)
            contributions += [(slot, Materialised(rows[slot], part.rounding())) for slot in strategy.use.wrt]
            continue
        pieces = cut(strategy, part, values, back) if strategy.slices and part.has_blocks else None
        if pieces is None:
            others.append(part)
        else:
            contributions += list(pieces.items())
    if others:
        function = strategy.use.target
        linear = not isinstance(function, UserFunction) or function.linear
        whole = Pullback(_value(others, values, strategy, n, planner), back, False, linear)
        contributions += [(slot, Virtual(whole, slot, values[slot].is_complex())) for slot in strategy.use.wrt]
    return contributions


def _computed_in(values: Sequence[Any], rows: Tensor) -> torch.dtype:
    """Return what a user's own function computes in, and gives such gradients in."""
    dtype = next((v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()), rows.dtype)
    return dtype.to_complex() if rows.is_complex() else dtype


def _value(parts: Sequence[Part], values: Sequence[Any], strategy: Strategy, n: int, planner: Planner) -> SampleGrads:
    """Return the gradients of u."""
    like = next(values[slot] for slot in strategy.use.wrt)
    shape, dtype = parts[0].own_shape(), accumulating(like.dtype)
    is_complex = strategy.use.is_complex or any(part.is_complex for part in parts)
    dtype = dtype.to_complex() if is_complex else dtype
    return SampleGrads(strategy.use.op, shape, dtype, n, like, list(parts), replace(planner, overrides={}))
