"""What it takes to contract a term where its gradient itself is not asked for, on a machine.

A term has a few ways to its norms and to its weighted sum over samples. Each kind of term has a table of what they
take (`fxgrad.terms`), in what `fxgrad.costs.machines` measures the speed of. The time is the sum of each amount over
its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

import sympy

from fxgrad.costs.machines import Machine
from fxgrad.kernels.sizes import hint
from fxgrad.terms.work import Contraction, CostTable, Way, Work, e, n

# Note [What may be held]
# ~~~~~~~~~~~~~~~~~~~~~~~
# Gradients that were multiplied out live until the end of the backward, in the place of the factors they were made of.
# Where they are much larger, the peak of memory would rise, whatever time they save. Where they are somewhat larger,
# they have to save some: gradients of twice their factors' size a third of the time. Small ones go by time alone.
HELD = 2.5  # times the factors' elements
WORTH = 0.5  # of the gradients' own time, for each time that they are larger than their factors
SMALL = 16 * 2**20  # bytes of one use

NOISE = 1.15  # ways whose times are closer than measurements are take the order of `Way`: what holds least comes first


class Cost(NamedTuple):
    """What a way takes on a machine."""

    flops: float
    bytes: float
    seconds: float


def costs(contraction: Contraction, machine: Machine, batch: int, *, sums: bool = True) -> dict[Way, Cost]:
    """Return what each way that a term can have takes for a batch; ``sums``: also for a weighted sum."""
    numbers = tuple(map(hint, contraction.sizes))
    return _costs(contraction.table, contraction.ways, numbers, contraction.itemsize, machine, batch, sums)


@lru_cache(maxsize=4096)
def _costs(
    table: CostTable, ways: Sequence[Way], sizes: Sequence[int], itemsize: int, machine: Machine, batch: int, sums: bool
) -> dict[Way, Cost]:
    speeds = [machine.speed(field.name) for field in fields(Work)]
    slower = itemsize / 4  # per flop, than in float32
    prices = {}
    for way, (norms, after) in zip(table.costs, _function(table)(batch, itemsize, *sizes), strict=True):
        if way in ways:
            work = [a + b for a, b in zip(norms, after, strict=True)] if sums else list(norms)
            times = [amount / speed for amount, speed in zip(work, speeds, strict=True)]
            prices[way] = Cost(sum(work[:3]), sum(work[3:5]), slower * sum(times[:3]) + sum(times[3:]))
    return prices


@lru_cache
def _function(table: CostTable) -> Callable[..., list[tuple[list[float], list[float]]]]:
    """Return a table as a function of numbers: (n, e, sizes..) -> for each way (for the norms, for the sum)."""
    rows = [[list(cost.norms.parts()), list(cost.sums.parts())] for cost in table.costs.values()]
    compiled: Callable[..., list[tuple[list[float], list[float]]]]
    compiled = sympy.lambdify((n, e, *table.symbols), rows, modules="math")
    return compiled


def holds_too_much(contraction: Contraction, prices: Mapping[Way, Cost], batch: int) -> bool:
    """See Note [What may be held]."""
    elements, factors = hint(contraction.elements), hint(contraction.factors)
    if elements > HELD * factors:
        return True
    if Way.MATERIALISE not in prices or batch * elements * contraction.itemsize <= SMALL:
        return False
    held = prices[Way.MATERIALISE].seconds
    saved = min(price.seconds for way, price in prices.items() if way is not Way.MATERIALISE) - held
    return saved < WORTH * (elements / factors - 1) * held


def cheapest(prices: Mapping[Way, Cost], others: Mapping[Way, Cost] | None = None) -> Way:
    """Return the way of least time; of those that noise does not tell apart, the first in the order of `Way`.

    ``others`` are more ways, which it is not to be slower than, either.
    """
    fastest = min(prices, key=lambda way: prices[way].seconds)
    least = min(price.seconds for price in (others or prices).values())
    near = (way for way in Way if way in prices and prices[way].seconds <= NOISE * least)
    return next(near, fastest)
