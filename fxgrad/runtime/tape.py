"""Write down what every use in one forward says about its parameters, and compute the quantities from that.

There are two tapes. A `DenseTape` multiplies out as it goes: where only the gradients themselves are asked for, factors
that wait would raise the peak of memory. A `FactorTape` keeps factors, and how far rounding may be off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxgrad.costs.choices import Planner
from fxgrad.gradients.parts import rounded, summed
from fxgrad.gradients.sample_grads import SampleGrads, deferred
from fxgrad.host.autograd import current_task
from fxgrad.kernels.partitioning import in_backward
from fxgrad.kernels.precision import WIDE, accumulating, cast
from fxgrad.quantities import Quantity
from fxgrad.quantities.base import checked_results
from fxgrad.rules.strategies import Contributions, Strategy, matched
from fxgrad.rules.uses import Use
from fxgrad.runtime.pullback import pulled_back
from fxgrad.terms import Materialised, Part, Term, part_of


@dataclass(frozen=True)
class Like:
    """What a parameter is like."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Tape(ABC):
    """What the taps of one forward wrote down: per parameter key, the parts of its gradients."""

    grads: ClassVar[type[SampleGrads]] = SampleGrads

    quantities: Sequence[Quantity]
    loss_scale: float | str
    likes: Sequence[Like]
    given: Sequence[int]  # how many tensors each quantity is given
    planner: Planner
    parts: dict[int, list[Part]] = field(init=False, default_factory=dict)
    derived: list[tuple[int, Strategy, list[Any], int]] = field(init=False, default_factory=list)
    task: int | None = field(init=False, default=None)

    @abstractmethod
    def derive(self, key: int, strategy: Strategy) -> None:
        """Announce one more function of parameters, in the forward."""

    @abstractmethod
    def scaled(self, g: Tensor, n: int) -> Tensor:
        """g for a loss that is a sum over samples, as the tape takes it."""

    def record(self, strategy: Strategy, g: Tensor, values: list[Any], n: int) -> None:
        """Differentiate one use and add what it says about each of its parameters."""
        self.add(strategy.use, strategy.terms(g, values, n), n)

    def record_several(self, strategy: Strategy, grads: Sequence[Tensor], values: list[Any], n: int) -> None:
        """The same of an op with several outputs."""
        self.add(strategy.use, strategy.terms_of_several(grads, values, n), n)

    @abstractmethod
    def note(self, key: int, value: Part | Tensor) -> None:
        """Add one more part to a parameter's gradients."""

    @abstractmethod
    def pull_back(self) -> None:
        """From functions of parameters to the parameters, children before their parents."""

    @abstractmethod
    def results_scale(self, n: int) -> float:
        """Return what the parts still have to be multiplied by."""

    def begin(self) -> None:
        """Forget what a backward that never reached Collect left behind."""
        task = current_task()
        if task != self.task:
            self.task = task
            self.parts.clear()
            self.derived.clear()

    def scale(self, n: int) -> float:
        """Return what makes gradients those of a sum over samples."""
        return n if isinstance(self.loss_scale, str) else self.loss_scale  # "mean"

    def add(self, use: Use, parts: Contributions, n: int, *, scaled: bool = True) -> None:
        """What one use says about each of its parameters; ``scaled``: for a loss that is a sum over samples."""
        for slot, part in parts:
            if not scaled and isinstance(part, Term):
                part = part.scaled(lambda factor: self.scaled(factor, n))
            elif not scaled and isinstance(part, Tensor):
                part = self.scaled(part, n)
            self.note(use.wrt[slot], part)

    def name_of(self, key: int) -> str:
        """Return the parameter's name; none for a function of parameters."""
        return self.likes[key].name if key < len(self.likes) else ""

    def results(self, n: int, like: Tensor, given: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what the quantities make of all that was written down, in the order of their deliveries."""
        scale = self.results_scale(n)
        grads_of_all = [
            self.grads(param.name, param.shape, param.dtype, n, like, self.parts.get(key, []), self.planner, scale)
            for key, param in enumerate(self.likes)
        ]
        results: list[Tensor | None] = []
        left = list(given)
        for quantity, wanted in zip(self.quantities, self.given, strict=True):
            grads = [grads.grouped(quantity.group_size) for grads in grads_of_all]
            if not quantity.own:
                grads = [replace(one, lent=True) for one in grads]
            found = quantity.compute(grads, quantity.units(n), left[:wanted])
            if not quantity.own:
                found = checked_results(quantity, found, n, self._stand_ins(like))
            results += found
            del left[:wanted]
        return results

    def _stand_ins(self, like: Tensor) -> dict[str, Tensor]:
        """Return values that a user's quantity can take for the parameters, to say what it delivers."""
        empty = {dtype: like.new_empty((), dtype=dtype) for dtype in {one.dtype for one in self.likes}}
        return {one.name: empty[one.dtype].expand(one.shape) for one in self.likes}


class DenseTape(Tape):
    """Every use is multiplied out and added up at once: all quantities ask for the gradients themselves."""

    def derive(self, key: int, strategy: Strategy) -> None:
        """Note nothing: no norm is asked for that the function could change."""

    def scaled(self, g: Tensor, n: int) -> Tensor:
        return g if self.loss_scale == 1 else g * self.scale(n)

    def note(self, key: int, value: Part | Tensor) -> None:
        part = part_of(value)
        if key < len(self.likes) and part.is_complex:  # a real parameter has the real part
            part = Materialised(part.dense().real)
        self.parts[key] = [Materialised(summed([*self.parts.get(key, []), part]))]

    def pull_back(self) -> None:
        for key, strategy, values, n in self.derived:
            for part in self.parts.pop(key, []):
                self.record(strategy, strategy.use.as_value(part.dense()), values, n)
        self.derived.clear()

    def results_scale(self, n: int) -> float:
        return 1


@dataclass(eq=False)
class FactorTape(Tape):
    """Factors are kept, and how far rounding may be off: some quantity asks for norms, or for sums over samples."""

    non_isometric: set[int] = field(init=False, default_factory=set)  # functions of parameters that may change norms
    # Those that do not: the parameter whose elements they move.
    permuted_names: dict[int, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.materialises = any(quantity.dense for quantity in self.quantities)  # some ask for the gradients, too

    def derive(self, key: int, strategy: Strategy) -> None:
        parents = list(strategy.use.wrt.values())
        isometric = strategy.permutes or strategy.slices
        if isometric and self.non_isometric.isdisjoint(parents):
            self.permuted_names[key] = self.name_of(parents[0])
        else:
            self.non_isometric.add(key)

    def name_of(self, key: int) -> str:
        """Return the parameter's name, also of what moves its elements."""
        return super().name_of(key) or self.permuted_names.get(key, "")

    def scaled(self, g: Tensor, n: int) -> Tensor:
        """g as it is: norms and sums are scaled, and g is not rounded."""
        return g

    def results_scale(self, n: int) -> float:
        return self.scale(n)

    def record(self, strategy: Strategy, g: Tensor, values: list[Any], n: int) -> None:
        if not strategy.native:
            return super().record(strategy, g, values, n)

        def wide() -> Contributions:
            rows = cast(g, WIDE)
            return strategy.terms(rows, matched(values, rows), n)

        if strategy.name in ("rule", "elementwise"):
            parts = self._unrounded(strategy, strategy.terms(g, values, n), wide)
        else:
            parts = wide()
        self._add_narrowed(strategy, parts, g, n)

    def record_several(self, strategy: Strategy, grads: Sequence[Tensor], values: list[Any], n: int) -> None:
        if not strategy.native:
            return super().record_several(strategy, grads, values, n)
        rows = [cast(g, WIDE) for g in grads]
        parts = strategy.terms_of_several(rows, matched(values, rows[0]), n)
        self._add_narrowed(strategy, parts, grads[0], n)

    def _unrounded(self, strategy: Strategy, parts: Contributions, wide: Callable[[], Contributions]) -> Contributions:
        """Return what a function of parameters may enlarge, and what no bound is known for, from float64."""
        again = [strategy.loses(part) or self._is_enlarged(strategy, slot, part) for slot, part in parts]
        if not any(again):
            return parts
        pairs = zip(again, parts, wide(), strict=True)
        return [(slot, part_of(other).dense() if chosen else part) for chosen, (slot, part), (_, other) in pairs]

    def _is_enlarged(self, strategy: Strategy, slot: int, part: Part | Tensor) -> bool:
        """Whether a function of parameters may enlarge what was rounded already; alpha is what addmm multiplies by."""
        is_rounded = "alpha" in strategy.use.kwargs or not part_of(part).unrounded
        return is_rounded and strategy.use.wrt[slot] in self.non_isometric

    def _add_narrowed(self, strategy: Strategy, parts: Contributions, g: Tensor, n: int) -> None:
        """Add what was computed in float64 for parameters in float32, and how far that rounds it."""
        real = accumulating(g.dtype).to_real()

        def narrowed(slot: int, part: Part | Tensor) -> Part | Tensor:
            keeps_wide = strategy.use.wrt[slot] in self.non_isometric
            if keeps_wide or not isinstance(part, Tensor) or part.dtype.to_real() == real:
                return part
            return rounded(part, real.to_complex() if part.is_complex() else real)

        self.add(strategy.use, [(slot, narrowed(slot, part)) for slot, part in parts], n)

    def note(self, key: int, value: Part | Tensor) -> None:
        parts = self.parts.setdefault(key, [])
        with in_backward():
            part = self._real(key, part_of(value).in_full_precision())
            if key in self.non_isometric:  # its function may enlarge what rounding did: nothing is rounded before
                parts.append(part)
            elif self.materialises:
                parts[:] = [Materialised.merged([*parts, part])]
            else:
                parts.append(deferred(part, self.name_of(key), self.planner))

    def _real(self, key: int, part: Part) -> Part:
        """Return the real part of what complex factors give a real parameter."""
        if key >= len(self.likes) or not part.is_complex:
            return part
        whole = part.materialised()
        return Materialised(whole.rows.real, whole.rounding())

    def pull_back(self) -> None:
        for key, strategy, values, n in self.derived:
            parts = self.parts.pop(key, None)
            if parts:
                self.add(strategy.use, pulled_back(strategy, parts, values, n, self.planner), n)
        self.derived.clear()


def tape_for(quantities: Sequence[Quantity]) -> type[Tape]:
    """Return the tape that quantities need."""
    return DenseTape if all(quantity.dense for quantity in quantities) else FactorTape
