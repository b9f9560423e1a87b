"""What the contraction of a term takes, in the units in which `fxgrad.costs.machines` measures speed.

Units are flops in large products, in a product for each sample and in the kernels that compute each sample's gradient;
bytes in memory and in the cache; calls of operators on a CPU, and launches of kernels on a GPU. Each kind of term has a
table of `Costs`, one for each `Way` to contract it. The tables share these letters:

    n  samples         k  positions of a sample     e  bytes of an element
    o  fan-out         i  fan-in                    w  elements of the weight
    p  pixels          c  channels of the input     f  shifts inside the kernel     s  elements of a sample's g and x
    v  rows of a table     d  elements of one       m  products of an einsum
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import sympy
from sympy import Expr, Integer

n, k, o, i, e, w, p, c, f, s, v, d, m = sympy.symbols("n k o i e w p c f s v d m", nonnegative=True)
ZERO = Integer(0)


class Way(enum.Enum):
    """A way to contract a term; its value is what ``strategy=`` calls it."""

    RANK_ONE = "rank_one"  # ‖g ⊗ x‖ = ‖g‖ ‖x‖, where there is one position
    ROWS = "rows"  # of a table: add up the rows of one id
    GRAM = "gram"  # products of positions with each other, of windows by their pixels'
    RECOMPUTE = "recompute"  # multiplied out a few samples at a time for the norms, and again for the sum
    MATERIALISE = "materialise"  # multiplied out when its use is differentiated, and held to the end


@dataclass(frozen=True)
class Work:
    """What is done, by what says how fast (`Machine.speed`)."""

    product: Expr = ZERO  # flops in a product of large matrices
    batched: Expr = ZERO  # flops in one product for each sample
    kernel: Expr = ZERO  # flops in a kernel that computes each sample's gradient, or in a native convolution
    memory: Expr = ZERO  # bytes read or written
    cache: Expr = ZERO  # bytes read or written where a few samples at a time stay in the cache
    call: Expr = ZERO  # operators called on a CPU
    launch: Expr = ZERO  # kernels launched on a GPU, as counted of what Inductor writes there

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


@dataclass(frozen=True, eq=False)
class CostTable:
    """The costs of one kind of term, and the letters for its sizes."""

    kind: str
    symbols: tuple[sympy.Symbol, ...]
    costs: Mapping[Way, Costs]


@dataclass(frozen=True)
class Contraction:
    """A term as the cost model sees it: its table, its sizes there, and the ways that it can have."""

    table: CostTable
    sizes: tuple[Any, ...]
    ways: tuple[Way, ...]
    factors: Any  # elements of a sample's factors
    elements: Any  # elements of a sample's gradient
    itemsize: int

    @property
    def kind(self) -> str:
        return self.table.kind

    def expression(self, cost: Expr, batch: Any, size_of: Callable[[Any], Any]) -> Any:
        """Return an expression of its table at these sizes; ``size_of`` makes one what it is to be shown as."""
        at = {symbol: size_of(size) for symbol, size in zip(self.table.symbols, self.sizes, strict=True)}
        return cost.subs({n: batch, e: self.itemsize, **at}, simultaneous=True)
