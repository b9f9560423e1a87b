"""What it takes to contract a term where its gradient itself is not asked for, on a machine.

A term has a few ways to its norms and to its weighted sum over samples. Each kind of term has a table of what they
take (`fxgrad.terms`), in what `fxgrad.costs.machines` measures the speed of. The time is the sum of each amount over
its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
from sympy import Expr

from fxgrad.costs.machines import Machine
from fxgrad.kernels.sizes import hint
from fxgrad.terms import Term
from fxgrad.terms.work import Costs, Way, Work, e, n

# Note [What may be held]
# ~~~~~~~~~~~~~~~~~~~~~~~
# Gradients that were multiplied out live until the end of the backward, in the place of the factors they were made of.
# Where they are much larger, the peak of memory would rise, whatever time they save.
HELD = 2.5  # times the factors' elements

TABLES: dict[str, tuple[tuple[sympy.Symbol, ...], Mapping[Way, Costs]]] = {
    table.kind: (table.symbols, table.costs) for table in (kind.costs for kind in Term.kinds)
}

NOISE = 1.15  # ways whose times are closer than measurements are take the order of `Way`: what holds least comes first


@dataclass(frozen=True)
class Contraction:
    """A term as the cost model sees it: the name of its table, its sizes there, and the ways it can have."""

    kind: str
    sizes: tuple[Any, ...]
    ways: tuple[Way, ...]
    factors: Any  # elements of a sample's factors
    elements: Any  # elements of a sample's gradient
    itemsize: int

    def holds_too_much(self) -> bool:
        """See Note [What may be held]."""
        return hint(self.elements) > HELD * hint(self.factors)

    def expression(self, found: Expr, batch: Any, size_of: Callable[[Any], Any]) -> Any:
        """An expression of its table at these sizes; ``size_of`` makes one what it is to be shown as."""
        symbols, _ = TABLES[self.kind]
        at = {symbol: size_of(size) for symbol, size in zip(symbols, self.sizes, strict=True)}
        return found.subs({n: batch, e: self.itemsize, **at}, simultaneous=True)


def contraction_of(term: Term) -> Contraction:
    """How a term looks to its table."""
    table, sizes, ways, factors, elements = term.measures()
    itemsize = max([4, *(value.element_size() for value in term.tensors())])  # half types are computed with in float32
    return Contraction(table.kind, sizes, ways, factors, elements, itemsize)


class Cost(NamedTuple):
    """What a way takes on a machine."""

    flops: float
    bytes: float
    seconds: float


def costs(found: Contraction, machine: Machine, batch: int, *, sums: bool = True) -> dict[Way, Cost]:
    """What each way that a term can have takes for a batch; ``sums``: also for a weighted sum."""
    numbers = tuple(map(hint, found.sizes))
    return _costs(found.kind, found.ways, numbers, found.itemsize, machine, batch, sums)


@lru_cache(maxsize=4096)
def _costs(
    kind: str, ways: Sequence[Way], sizes: Sequence[int], itemsize: int, machine: Machine, batch: int, sums: bool
) -> dict[Way, Cost]:
    speeds = [getattr(machine, field.name) for field in fields(Work)]
    slower = itemsize / 4  # per flop, than in float32
    found = {}
    for way, (norms, after) in _functions(kind)(batch, itemsize, *sizes).items():
        if way in ways:
            work = [a + b for a, b in zip(norms, after, strict=True)] if sums else list(norms)
            times = [amount / speed for amount, speed in zip(work, speeds, strict=True)]
            found[way] = Cost(sum(work[:3]), sum(work[3:5]), slower * sum(times[:3]) + sum(times[3:]))
    return found


@lru_cache
def _functions(kind: str) -> Callable[..., dict[Way, tuple[list[float], list[float]]]]:
    """A table as a function of numbers: (n, e, sizes..) -> way -> (for the norms, for the sum)."""
    symbols, table = TABLES[kind]
    rows = [[list(cost.norms.parts()), list(cost.sums.parts())] for cost in table.values()]
    compiled = sympy.lambdify((n, e, *symbols), rows, modules="math")
    return lambda *numbers: dict(zip(table, compiled(*numbers), strict=True))


def cheapest(prices: Mapping[Way, Cost]) -> Way:
    """The way of least time; of those that noise does not tell apart, the first in the order of `Way`."""
    least = min(price.seconds for price in prices.values())
    return next(way for way in Way if way in prices and prices[way].seconds <= NOISE * least)
