"""Which way each term is contracted: the cheapest on this machine, unless ``strategy=`` says another.

The choice is made when the backward is traced, from the sizes of the first call, and written into the graph: what is
compiled for one machine or strategy is no other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from fxgrad.costs.contractions import Cost, cheapest, costs, holds_too_much
from fxgrad.costs.machines import REFERENCE, Machine
from fxgrad.errors import OptionError, nearest
from fxgrad.terms import Term
from fxgrad.terms.work import Contraction, Way, Work

Strategy = str | Mapping[str, str]  # a way, or for names of parameters, or patterns of names, one each

NAMES = tuple(way.value for way in Way)


@dataclass(frozen=True)
class Override:
    """What ``strategy=`` says about one parameter."""

    way: Way
    pattern: str  # or the parameter's name
    exact: bool  # a name: every use has to be able to; else those that are


@dataclass(frozen=True)
class Choice:
    """How one term is contracted, and why."""

    way: Way
    why: str
    found: Contraction | None = None  # None for a gradient that its rule gave multiplied out
    costs: Mapping[Way, Cost] = field(default_factory=dict)  # of every way it can have

    def work(self, sums: bool, way: Way | None = None) -> Work:
        """Return what its way, or another one, takes, as its table has it; ``sums``: with a weighted sum."""
        assert self.found is not None
        cost = self.found.table.costs[way or self.way]
        return cost.norms + cost.sums if sums else cost.norms


@dataclass(frozen=True)
class Planner:
    """What chooses: a machine, overrides, and what is asked for."""

    machine: Machine = REFERENCE
    overrides: Mapping[str, Override] = field(default_factory=dict)  # by parameter
    batch: int = 32  # samples in the first call
    sums: bool = True  # whether a weighted sum follows the norms
    log: list[tuple[str, Choice]] | None = field(default=None, compare=False)

    def of(self, name: str, term: Term, *, deferred: bool = False) -> Way:
        """The way of a term of one parameter; ``deferred``: it has not been multiplied out, and will not be held."""
        choice = self.choice(name, term.contraction(), deferred=deferred)
        if self.log is not None:
            self.log.append((name, choice))
        return choice.way

    def choice(self, name: str, found: Contraction, *, deferred: bool = False) -> Choice:
        """Return the same with its reasons."""
        every = costs(found, self.machine, self.batch, sums=self.sums)
        lean: dict[Way, Cost] = {way: price for way, price in every.items() if way is not Way.MATERIALISE}
        prices = lean if deferred else every
        override = self.overrides.get(name)
        if override is not None and override.way in prices:
            return Choice(override.way, "strategy=", found, prices)
        if override is not None and override.exact:
            raise cannot(name, override.way, prices)
        if len(prices) == 1:
            return Choice(next(iter(prices)), "the only way it has", found, prices)
        if holds_too_much(found, every, self.batch):
            way = cheapest(lean)
            held = len(lean) < len(prices) and prices[Way.MATERIALISE].seconds < prices[way].seconds
            return Choice(way, "cheapest that holds no gradients" if held else "cheapest", found, prices)
        way = cheapest(prices, every)  # what is deferred was as cheap as if it were held, and stays so
        least = min(price.seconds for price in prices.values())
        why = "cheapest" if prices[way].seconds == least else "as cheap as any, and holds less"
        return Choice(way, why, found, prices)

    def multiplied_out(self, name: str) -> None:
        """Several uses without a common form are added up as gradients; raise where that was not to be."""
        override, reason = self.overrides.get(name), "its uses have no form in common"
        if override is not None and override.exact and override.way is not Way.MATERIALISE:
            raise cannot(name, override.way, [Way.MATERIALISE], reason)
        if self.log is not None:
            self.log.append((name, Choice(Way.MATERIALISE, reason)))

    def grouped(self, size: int) -> Planner:
        """Return the same where ``size`` rows are one sample."""
        return self if size == 1 else replace(self, batch=max(1, self.batch // size))


def cannot(name: str, way: Way, has: Iterable[Way], reason: str = "") -> OptionError:
    """Return the error of a use that cannot be contracted as the user said."""
    ways = ", ".join(f"'{one.value}'" for one in has)
    return OptionError(
        f"strategy={way.value!r} does not fit parameter '{name}'" + (f": {reason}" if reason else ""),
        advice=f"It can have {ways}.",
    )


def overrides_of(strategy: Strategy | None, names: Mapping[str, str], *, whole: bool = True) -> dict[str, Override]:
    """Return what a strategy says about each parameter; ``names`` has every name of each, and the one it goes by.

    A name counts before a pattern, and a pattern before one that stands behind it. ``whole``: all names are known.
    """
    if strategy is None:
        return {}
    ways = {"*": strategy} if isinstance(strategy, str) else dict(strategy)
    by_name = {names[name]: Override(Way(way), name, True) for name, way in ways.items() if name in names}
    by_pattern: dict[str, Override] = {}
    for pattern, way in ways.items():
        if pattern in names:
            continue
        matched = [parameter for name, parameter in names.items() if fnmatchcase(name, pattern)]
        if not matched and whole:
            raise OptionError(
                f"strategy names {pattern!r}, and the model has no such parameter",
                advice=nearest(pattern, names, f"It has {_some(sorted(set(names)))}."),
            )
        for parameter in matched:
            by_pattern.setdefault(parameter, Override(Way(way), pattern, False))
    return {**by_pattern, **by_name}


def check_applied(overrides: Mapping[str, Override], chosen: Mapping[str, list[Choice]]) -> None:
    """Raise where a pattern changes nothing: no use of the parameters it matches can have its way."""
    for pattern in dict.fromkeys(override.pattern for override in overrides.values() if not override.exact):
        matched = [name for name, override in overrides.items() if override.pattern == pattern and not override.exact]
        choices = [choice for name in matched for choice in chosen.get(name, [])]
        if choices and not any(choice.why == "strategy=" for choice in choices):
            has = dict.fromkeys(way for choice in choices for way in choice.costs or [Way.MATERIALISE])
            raise cannot(_some(matched), overrides[matched[0]].way, has)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
