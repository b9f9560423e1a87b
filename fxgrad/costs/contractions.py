"""What it takes to contract a term where its gradient itself is not asked for: the cost model, as a page.

A term has a few ways to its norms and to its weighted sum over samples. For each of them the tables below say what it
takes, in what `fxgrad.costs.machines` measures the speed of: flops in large products, in a product for each sample and
in the kernels that make each sample's gradient; bytes in memory and in the cache; calls of operators. Its time is the
sum of each over its speed.

    n  samples         k  positions of a sample     e  bytes of an element
    o  fan-out         i  fan-in                    w  elements of the weight
    p  pixels          c  channels of the input     f  shifts inside the kernel     s  elements of a sample's g and x
    v  rows of a table     d  elements of one       m  products of an einsum
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
from sympy import Expr, Integer
from torch import Tensor

from fxgrad.costs.machines import Machine
from fxgrad.samples.symbols import hint
from fxgrad.terms import Patches, Term, is_one


class Way(enum.Enum):
    """A way to contract a term; its value is what ``strategy=`` calls it."""

    RANK_ONE = "rank_one"  # ‖g ⊗ x‖ = ‖g‖ ‖x‖, where there is one position
    ROWS = "rows"  # of a table: add up the rows of one id
    GRAM = "gram"  # products of positions with each other, of windows by their pixels'
    RECOMPUTE = "recompute"  # multiplied out a few samples at a time for the norms, and again for the sum
    MATERIALISE = "materialise"  # multiplied out when its use is differentiated, and held to the end


ZERO = Integer(0)


@dataclass(frozen=True)
class Work:
    """What is done, by what says how fast: one field for each speed of a `Machine`."""

    product: Expr = ZERO  # flops in a product of large matrices
    batched: Expr = ZERO  # flops in one product for each sample
    kernel: Expr = ZERO  # flops in a kernel that computes each sample's gradient, or in a native convolution
    memory: Expr = ZERO  # bytes read or written
    cache: Expr = ZERO  # bytes read or written where a few samples at a time stay in the cache
    call: Expr = ZERO  # operators called

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[Expr, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def flops(self) -> Expr:
        return self.product + self.batched + self.kernel

    @property
    def bytes(self) -> Expr:
        return self.memory + self.cache


class Costs(NamedTuple):
    """What one way takes: for the norms, and for the weighted sum after them."""

    norms: Work
    sums: Work


n, k, o, i, e, w, p, c, f, s, v, d, m = sympy.symbols("n k o i e w p c f s v d m", nonnegative=True)

GRAMS = 1 << 20  # bytes of Gram matrices that one round of calls looks at

# Σ_k g_nk ⊗ x_nk. The Gram matrices are symmetric: half of them is computed, and the blocks on the diagonal. The norms
# of what is multiplied out are taken while it is in the cache, a few samples at a time.
_product_sum = Work(product=2 * n * k * o * i, memory=2 * e * n * k * (o + i), call=Integer(6))
PRODUCT = {
    Way.RANK_ONE: Costs(
        Work(memory=e * n * (o + i)),
        Work(product=2 * n * o * i, memory=2 * e * n * (o + i)),
    ),
    Way.GRAM: Costs(
        Work(
            kernel=n * k * (k + 16) * (o + i),
            memory=e * n * k * (o + i),
            cache=e * n * k * (o + i + 2 * k),
            call=Integer(20),
        ),
        _product_sum,
    ),
    Way.RECOMPUTE: Costs(
        Work(
            kernel=2 * n * k * o * i,
            memory=e * n * k * (o + i),
            cache=e * n * (k * (o + i) + o * i),
            call=Integer(15),
        ),
        _product_sum,
    ),
    Way.MATERIALISE: Costs(
        Work(
            kernel=2 * n * k * o * i,
            memory=e * n * (k * (o + i) + o * i),
            cache=e * n * (k * (o + i) + o * i),
            call=Integer(15),
        ),
        Work(memory=e * n * o * i, call=Integer(2)),
    ),
}

# A convolution's weight gradient, by a kernel that copies each sample, keeps its sums in registers and looks at each
# weight's gradient once, in the cache. Windows' Gram matrices are added up from the pixels', shift by shift.
_window_sum = Work(kernel=2 * n * k * w, memory=2 * e * n * s, call=Integer(8))
WINDOWS = {
    Way.GRAM: Costs(
        Work(
            batched=2 * n * (p**2 * c + k**2 * o),
            memory=e * n * s,
            cache=(6 * f + 13) * e * n * k**2,
            call=(30 + 8 * f) * (1 + e * n * p**2 / GRAMS),
        ),
        _window_sum,
    ),
    Way.RECOMPUTE: Costs(
        Work(
            kernel=2 * n * k * w,
            memory=e * n * s,
            cache=e * n * (s + w),
            call=Integer(20),
        ),
        _window_sum,
    ),
    Way.MATERIALISE: Costs(
        Work(
            kernel=2 * n * k * w,
            memory=e * n * (s + w),
            cache=e * n * (s + 2 * w),
            call=Integer(20),
        ),
        Work(memory=e * n * w, call=Integer(2)),
    ),
}

# Rows of a table: k of them are read, and v d numbers are a gradient.
TABLE = {
    Way.ROWS: Costs(
        Work(cache=(3 * e * d + 600) * n * k, call=Integer(15)),  # finding an id takes as long as 600 bytes
        Work(memory=2 * e * n * k * d + 2 * e * v * d, call=Integer(4)),
    ),
    Way.MATERIALISE: Costs(
        Work(memory=e * n * v * d, cache=2 * e * n * k * d, call=Integer(6)),
        Work(memory=e * n * v * d, call=Integer(2)),
    ),
}

# Anything else: a sum over positions, an einsum of several factors.
OTHER = {
    Way.MATERIALISE: Costs(
        Work(batched=2 * n * m, memory=e * n * (s + 2 * w), call=Integer(2)),
        Work(memory=e * n * w, call=Integer(1)),
    ),
}

# Note [What may be held]
# ~~~~~~~~~~~~~~~~~~~~~~~
# Gradients that were multiplied out live until the end of the backward, in the place of the factors they were made of.
# Where they are much larger, the peak of memory would rise, whatever time they save.
HELD = 2.5  # times the factors' elements

TABLES: dict[str, tuple[tuple[sympy.Symbol, ...], Mapping[Way, Costs]]] = {
    "product": ((k, o, i), PRODUCT),
    "windows": ((k, w, p, c, o, f, s), WINDOWS),
    "table": ((k, v, d), TABLE),
    "other": ((m, s, w), OTHER),
}

NOISE = 1.15  # ways whose times are closer than measurements are take the order of `Way`: what holds least comes first


@dataclass(frozen=True)
class Contraction:
    """A term as the page sees it: the name of its table, its sizes there, and the ways it can have."""

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
        """An expression of the page at these sizes; ``size_of`` makes one what it is to be shown as."""
        symbols, _ = TABLES[self.kind]
        at = {symbol: size_of(size) for symbol, size in zip(symbols, self.sizes, strict=True)}
        return found.subs({n: batch, e: self.itemsize, **at}, simultaneous=True)


def contraction_of(term: Term) -> Contraction:
    """How a term looks to the page."""
    tensors = _tensors(term)
    itemsize = max([4, *(tensor.element_size() for tensor in tensors)])  # half types are computed with in float32
    product, table, windows = term.product(), term.rows(), term.windows()
    if any(tensor.is_complex() for tensor in tensors):
        return _other(term, tensors, itemsize)
    if product is not None:
        g, x = product
        positions, fan_out, fan_in = g.shape[1], g.shape[2], x.shape[2]
        ways = _ways("product", {Way.RANK_ONE: is_one(positions)})
        factors = positions * (fan_out + fan_in)
        return Contraction("product", (positions, fan_out, fan_in), ways, factors, fan_out * fan_in, itemsize)
    if table is not None:
        ids, g = table
        factors = g.shape[1] * (g.shape[2] + 2)  # an id is as large as two numbers
        sizes = (g.shape[1], ids.classes, g.shape[2])
        return Contraction("table", sizes, _ways("table"), factors, ids.classes * g.shape[2], itemsize)
    if windows is not None:
        return _windows(*windows, itemsize)
    return _other(term, tensors, itemsize)


def _windows(g: Tensor, patches: Patches, itemsize: int) -> Contraction:
    x = patches.input
    met = x if patches.settings.transposed else g  # each of its pixels meets the weights of its window
    elements, factors = math.prod(patches.kernel), _elements(g) + _elements(x)
    sizes = (
        met.shape[1] * math.prod(met.shape[3:]),
        elements,
        math.prod(x.shape[3:]),
        x.shape[2],
        g.shape[2],
        math.prod(patches.kernel[2:]),
        factors,
    )
    gram = is_one(g.shape[1]) and not patches.settings.transposed and patches.settings.groups == 1
    return Contraction("windows", sizes, _ways("windows", {Way.GRAM: gram}), factors, elements, itemsize)


def _other(term: Term, tensors: Sequence[Tensor], itemsize: int) -> Contraction:
    factors = sum(_elements(tensor) for tensor in tensors)
    sizes = letters(term)
    products = math.prod(sizes.values()) if len(tensors) > 1 else 0
    result = term.equation.replace(" ", "").partition("->")[2]
    elements = math.prod(sizes.get(letter, 1) for letter in result)
    return Contraction("other", (products, factors, elements), _ways("other"), factors, elements, itemsize)


def letters(term: Term) -> dict[str, Any]:
    """The sizes of an equation's letters and of its dots, those of the samples left out."""
    sizes: dict[str, Any] = {}
    inputs = term.equation.replace(" ", "").partition("->")[0].split(",")
    for names, factor in zip(inputs, term.factors, strict=True):
        if isinstance(factor, Tensor):
            before, dots, after = names.partition("...")
            rest = factor.shape[len(before) : factor.dim() - len(after)]
            sizes.update(zip(before, factor.shape, strict=False))
            sizes.update(zip(after, factor.shape[factor.dim() - len(after) :], strict=True))
            if dots:
                sizes["..."] = math.prod(rest)
    return {name: size for name, size in sizes.items() if name != "n"}


def _ways(kind: str, only_if: Mapping[Way, bool] | None = None) -> tuple[Way, ...]:
    """The ways of a table, without those whose condition does not hold."""
    return tuple(way for way in TABLES[kind][1] if (only_if or {}).get(way, True))


def _tensors(term: Term) -> list[Tensor]:
    inputs = (factor.input if isinstance(factor, Patches) else factor for factor in term.factors)
    return [factor for factor in inputs if isinstance(factor, Tensor)]


def _elements(factor: Tensor) -> Any:
    """Of one sample's part."""
    return math.prod(factor.shape[1:])


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
