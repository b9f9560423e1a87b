"""The tape of one forward: what every use says about its parameters, and what the quantities make of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxgrad.costs.choices import Ways
from fxgrad.gradients.parts import (
    Kept,
    Part,
    dense_of,
    has_complex,
    in_full_precision,
    is_factored,
    joined,
    multiplied_out,
    rounded,
    summed,
)
from fxgrad.gradients.sample_grads import SampleGrads, kept
from fxgrad.gradients.virtual import pulled_back
from fxgrad.partitioning import in_backward
from fxgrad.precision import FULL, WIDE, cast
from fxgrad.quantities import Quantity
from fxgrad.strategies import Contributions, Strategy, matched
from fxgrad.terms import Term
from fxgrad.uses import Use


@dataclass(frozen=True)
class Like:
    """What a parameter is like."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Tape:
    """What the taps of one forward wrote down: per parameter key, the parts of its gradients."""

    grads: ClassVar[type[SampleGrads]] = SampleGrads

    def __init__(
        self,
        quantities: Sequence[Quantity],
        loss_scale: float | str,
        likes: Sequence[Like],
        given: Sequence[int],
        ways: Ways,
    ) -> None:
        self.quantities, self.loss_scale, self.likes = quantities, loss_scale, likes
        self.given = given  # how many tensors each quantity is given
        self.ways = ways
        self.dense = any(quantity.dense for quantity in quantities)
        self.bounded = not all(quantity.dense for quantity in quantities)  # somebody asks how far rounding is off
        self.parts: dict[int, list[Part]] = {}
        self.derived: list[tuple[int, Strategy, list[Any], int]] = []
        self.bent: set[int] = set()  # functions of parameters that do more than move them
        self.moved: dict[int, str] = {}  # those that do not, and whose elements they move
        self.task: int | None = None

    def derive(self, key: int, strategy: Strategy) -> None:
        """One more function of parameters."""
        if not (strategy.keeps or strategy.cuts) or any(parent in self.bent for parent in strategy.use.wrt.values()):
            self.bent.add(key)
        else:
            self.moved[key] = self._name(next(iter(strategy.use.wrt.values())))

    def begin(self) -> None:
        """Forget what a backward that never reached Collect left behind."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task = task
            self.parts.clear()
            self.derived.clear()

    def scale(self, n: int) -> float:
        """What makes gradients those of a sum over samples."""
        return n if isinstance(self.loss_scale, str) else self.loss_scale  # "mean"

    def scaled(self, g: Tensor, n: int) -> Tensor:
        """g for a loss that is a sum over samples; where norms are bounded they are scaled, and g is not rounded."""
        return g if self.bounded or self.loss_scale == 1 else g * self.scale(n)

    def record(self, strategy: Strategy, g: Tensor, values: list[Any], n: int) -> None:
        """Differentiate one use and add what it says about each of its parameters."""
        if not (self.bounded and strategy.native):
            return self.add(strategy.use, strategy.terms(g, values, n), n)

        def wide() -> Contributions:
            rows = cast(g, WIDE)
            return strategy.terms(rows, matched(values, rows), n)

        if strategy.name in ("rule", "elementwise"):
            found = self._unrounded(strategy, strategy.terms(g, values, n), wide)
        else:
            found = wide()
        self.add(strategy.use, [(slot, self._narrowed(strategy, slot, part, g)) for slot, part in found], n)

    def record_several(self, strategy: Strategy, grads: Sequence[Tensor], values: list[Any], n: int) -> None:
        """The same of an op with several outputs."""
        if not (self.bounded and strategy.native):
            return self.add(strategy.use, strategy.terms_of_several(grads, values, n), n)
        rows = [cast(g, WIDE) for g in grads]
        found = strategy.terms_of_several(rows, matched(values, rows[0]), n)
        self.add(strategy.use, [(slot, self._narrowed(strategy, slot, part, grads[0])) for slot, part in found], n)

    def _unrounded(
        self, strategy: Strategy, found: Contributions, wide: Callable[[], Contributions]
    ) -> Contributions:
        """What a function of parameters may enlarge, and what no bound is known for, from float64."""
        rounds = "alpha" in strategy.use.kwargs  # what addmm multiplies by
        bent = [(rounds or not is_factored(part)) and strategy.use.wrt[slot] in self.bent for slot, part in found]
        again = [one or strategy.loses(part) for one, (_, part) in zip(bent, found, strict=True)]
        if not any(again):
            return found
        pairs = zip(again, found, wide(), strict=True)
        return [(slot, dense_of(other) if chosen else part) for chosen, (slot, part), (_, other) in pairs]

    def _narrowed(self, strategy: Strategy, slot: int, part: Part, g: Tensor) -> Part:
        """What was computed in float64 for a parameter in float32, and how far that rounds it."""
        own = cast(g.new_empty(0), FULL).dtype.to_real()
        if strategy.use.wrt[slot] in self.bent or not isinstance(part, Tensor) or part.dtype.to_real() == own:
            return part
        return rounded(part, own.to_complex() if part.is_complex() else own)

    def add(self, use: Use, parts: Contributions, n: int, *, scaled: bool = True) -> None:
        """What one use says about each of its parameters; ``scaled``: for a loss that is a sum over samples."""
        for slot, part in parts:
            key = use.wrt[slot]
            self.note(key, part if scaled or not isinstance(part, Term | Tensor) else self._scaled_part(part, n))

    def note(self, key: int, part: Part) -> None:
        """One more part of a parameter's gradients."""
        parts = self.parts.setdefault(key, [])
        if not self.bounded:  # what is multiplied out in any case does not wait: waiting factors raise the peak
            parts[:] = [summed([*parts, self._real(key, part)])]
            return
        with in_backward():
            part = self._real(key, in_full_precision(part))
            if key in self.bent:  # its function may enlarge what rounding did: nothing is rounded before
                parts.append(part)
            else:
                parts[:] = [joined([*parts, part])] if self.dense else [*parts, kept(part, self._name(key), self.ways)]

    def _name(self, key: int) -> str:
        """The parameter's, also of what moves its elements; none for another function of parameters."""
        return self.likes[key].name if key < len(self.likes) else self.moved.get(key, "")

    def _real(self, key: int, part: Part) -> Part:
        """A real parameter's gradient is the real part of what complex factors give."""
        if key >= len(self.likes) or not has_complex(part):
            return part
        if not self.bounded:
            return dense_of(part).real
        whole = multiplied_out(part)
        return Kept(whole.rows.real, whole.rounding)

    def _scaled_part(self, part: Term | Tensor, n: int) -> Term | Tensor:
        return part.scaled(lambda factor: self.scaled(factor, n)) if isinstance(part, Term) else self.scaled(part, n)

    def pull_back(self) -> None:
        """From functions of parameters to the parameters, children before their parents."""
        for key, strategy, values, n in self.derived:
            parts = self.parts.pop(key, None)
            if parts and not self.bounded:
                self.record(strategy, summed(parts), values, n)
            elif parts:
                self.add(strategy.use, pulled_back(strategy, parts, values, n, self.ways), n)
        self.derived.clear()

    def results(self, n: int, like: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
        """What the quantities make of all that was written down, in the order of their deliveries."""
        scale = self.scale(n) if self.bounded else 1
        rows = [
            self.grads(own.name, own.shape, own.dtype, n, like, self.parts.get(key, []), self.ways, scale)
            for key, own in enumerate(self.likes)
        ]
        found: list[Tensor] = []
        left = list(given)
        for quantity, wanted in zip(self.quantities, self.given, strict=True):
            grads = [own.grouped(quantity.group_size) for own in rows]
            found += quantity.compute(grads, quantity.units(n), left[:wanted])
            del left[:wanted]
        return found
