"""A per-sample gradient as a small tensor network, kept lazy.

A rule does not return tensors ``[B, *shape]`` but what they are made of: a product of factors with the
sample dimension ``n`` in front, contracted by an einsum. The linear layer's weight gradient is

    Term("n...o, n...i -> noi", g, x)

The constructor picks the kind of term once: `Product`, `Table`, `Windows`, or `Einsum` for any other. Each kind is
one file, with all that the quantities and the cost model ask of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import sympy
import torch
from torch import Tensor

from fxgrad.errors import RuleError
from fxgrad.kernels.factors import Factor, Patches
from fxgrad.kernels.norms import bounded
from fxgrad.kernels.precision import FULL, WIDE, at_most, cast, unit
from fxgrad.kernels.sums import summed_rows
from fxgrad.ops.equation import Equation
from fxgrad.terms.part import ChooseWay, Materialised, Part, Readable
from fxgrad.terms.work import Contraction, Costs, CostTable, Way, Work, e, m, n, s, w

if TYPE_CHECKING:
    from typing_extensions import Self

OTHER = CostTable(
    "other",
    (m, s, w),
    {
        Way.MATERIALISE: Costs(
            Work(batched=2 * n * m, memory=e * n * (s + 2 * w), call=sympy.Integer(2), launch=sympy.Integer(4)),
            Work(memory=e * n * w, call=sympy.Integer(1), launch=sympy.Integer(1)),
        )
    },
)
"""Of a term that is multiplied out in any case."""


_ADVICE = 'Write the einsum of the gradient, samples first, such as Term("n...o,n...i->noi", g, x).'


def _parsed(text: str, factors: Sequence[Factor]) -> Equation:
    """Parse the equation that a rule wrote for these factors."""
    equation = Equation.of(text)
    fault = equation.fault([factor.dim() if isinstance(factor, Tensor) else None for factor in factors])
    if fault:
        raise RuleError(f"the equation '{text}' of a Term {fault}", advice=_ADVICE)
    return equation


class Term(Part):
    """One use of one parameter: ``factors`` contracted by an einsum ``equation``, samples first.

    ``shape`` is the parameter's shape where the equation's output has its sizes in other dimensions.
    """

    kinds: ClassVar[list[type[Term]]] = []  # in the order in which they are asked whether a term is theirs
    costs: ClassVar[CostTable] = OTHER
    factor_types: ClassVar[tuple[type, ...]] = ()  # of a kind that these say

    equation: Equation
    factors: tuple[Factor, ...]
    shape: tuple[int, ...] | None

    def __new__(cls, equation: str | Equation = "", *factors: Factor, shape: Sequence[int] | None = None) -> Self:
        if cls is Term:
            parsed = equation if isinstance(equation, Equation) else Equation.of(equation)
            kinds = [kind for kind in Term.kinds if kind.takes(parsed, factors)]
            if not kinds:
                names = ", ".join(type(factor).__name__ for factor in factors if not isinstance(factor, Tensor))
                raise RuleError(f"the factors of a Term are tensors, and this one has {names}", advice=_ADVICE)
            cls = kinds[0]  # type: ignore[assignment]
        return object.__new__(cls)

    def __init__(self, equation: str | Equation, *factors: Factor, shape: Sequence[int] | None = None) -> None:
        self.equation = equation if isinstance(equation, Equation) else _parsed(equation, factors)
        self.factors = factors
        self.shape = None if shape is None else tuple(shape)

    @classmethod
    def takes(cls, equation: Equation, factors: Sequence[Factor]) -> bool:
        """Return whether a term is of this kind."""
        return len(factors) == len(cls.factor_types) and all(map(isinstance, factors, cls.factor_types))

    def with_factors(self, *factors: Factor) -> Self:
        """Return the term of the same kind of other factors."""
        return type(self)(self.equation, *factors, shape=self.shape)

    def in_shape(self, shape: Sequence[int] | None) -> Self:
        """Return the same elements in the same order as another shape; None for the equation's own."""
        return type(self)(self.equation, *self.factors, shape=shape)

    def tensors(self) -> list[Tensor]:
        """Return the values of the factors."""
        values = (factor.input if isinstance(factor, Patches) else factor for factor in self.factors)
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def is_complex(self) -> bool:
        return any(value.is_complex() for value in self.tensors())

    def dtype(self) -> torch.dtype:
        """Return the dtype of the gradient."""
        return reduce(torch.promote_types, [value.dtype for value in self.tensors()])

    # The gradients themselves.

    def dense(self, wide: bool = False) -> Tensor:
        return self.cast(WIDE).dense() if wide else self._shaped(self.contracted())

    def contracted(self) -> Tensor:
        """Return the einsum's result."""
        raise NotImplementedError

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows if self.shape is None else rows.reshape(rows.shape[0], *self.shape)

    def own_shape(self) -> tuple[int, ...]:
        return self.result_shape() if self.shape is None else self.shape

    def result_shape(self) -> tuple[int, ...]:
        """Return the shape of the einsum's result, samples left out."""
        raise NotImplementedError

    def rounding(self, made: float | None = None) -> Tensor:
        """See `Part.rounding`; ``made``: how far the entries of a single factor may be off, relative to themselves."""
        raise NotImplementedError

    def materialised(self) -> Materialised:
        return self._in_wide_numbers() if self.is_complex else self._materialised()

    def _materialised(self) -> Materialised:
        return Materialised(self.dense(), self.rounding())

    def _measured(self, rows: Tensor, measured: Tensor) -> Materialised:
        """Return what an operator multiplied out, and looked at while it was in the cache."""
        return Materialised(self._shaped(rows), measured=measured)

    def _in_wide_numbers(self, made: float = 0) -> Materialised:
        """Compilers add many numbers up one after another; in float64 that is as good as exact."""
        wide, narrow = self.cast(WIDE), self.dtype()
        rows = wide.dense()
        measured = bounded(rows, wide.rounding(made))
        norms, bounds = measured
        return Materialised(rows.to(narrow), bounds - norms + unit(narrow) * norms, measured)

    # What quantities make of them.

    # Complex ones are multiplied out for everything but their own shape, merging and grouping; others have ways of
    # their kind's own.

    def norms(self, way: ChooseWay) -> Tensor:
        return super().norms(way) if self.is_complex else self._norms(way)

    def _norms(self, way: ChooseWay) -> Tensor:
        return super().norms(way)

    def weighted(self, c: Tensor, wide: bool, onednn: bool) -> Tensor:
        term = self.cast(WIDE) if wide else self
        return summed_rows(term.dense(), c) if term.is_complex else term._weighted(at_most(c, term.dtype()), onednn)

    def _weighted(self, c: Tensor, onednn: bool) -> Tensor:
        return summed_rows(self.dense(), c)

    @property
    def width(self) -> int:
        """Of a kind that is `Readable`: the elements of a line."""
        return math.prod(self.result_shape()[1:])

    def moved(self, back: Callable[[Tensor], Tensor], traced: Callable[[Sequence[int]], Tensor]) -> Part | None:
        """A tensor without memory shows it: what stays in order is the term in another shape."""
        shape = self.own_shape()
        probe = traced(shape)
        moved_shape = tuple(probe.shape[1:])
        if probe.is_contiguous():
            return self.in_shape(None if moved_shape == self.result_shape() else moved_shape)
        transposed = moved_shape == shape[::-1] and probe.stride()[1:] == (1, math.prod(moved_shape[:1]))
        return self.transposed() if transposed and self.shape is None else None

    def transposed(self) -> Part | None:
        """Return the gradients of the transposed matrix; None where no term of the kind has them."""
        return None

    def by_lines(self) -> Readable:
        return self if isinstance(self, Readable) and not self.is_complex else super().by_lines()

    # The same term in other numbers.

    def scaled(self, scale: Callable[[Tensor], Tensor]) -> Self:
        """Return the term times a number, which ``scale`` multiplies into one of its factors."""
        factors = list(self.factors)
        first, tensor = next((i, factor) for i, factor in enumerate(factors) if isinstance(factor, Tensor))
        factors[first] = scale(tensor)
        return self.with_factors(*factors)

    def cast(self, dtypes: Mapping[torch.dtype, torch.dtype]) -> Self:
        """Return the term with factors of some dtypes in others."""

        def factor_as(factor: Factor) -> Factor:
            if isinstance(factor, Patches):
                return replace(factor, input=cast(factor.input, dtypes))
            return cast(factor, dtypes) if isinstance(factor, Tensor) else factor

        return self.with_factors(*map(factor_as, self.factors))

    def in_full_precision(self) -> Self:
        return self.cast(FULL)

    # What it costs.

    def contraction(self) -> Contraction:
        """Return what the cost model has to know; a complex term is multiplied out in any case."""
        factors, elements = self._factor_elements(), math.prod(self.result_shape())
        by_rows = self.is_complex or self.costs is OTHER
        sizes = (self._products(), factors, elements) if by_rows else self._table_sizes()
        table, ways = (OTHER, tuple(OTHER.costs)) if by_rows else (self.costs, self._ways())
        itemsize = max([4, *(value.element_size() for value in self.tensors())])  # half types are computed in float32
        return Contraction(table, sizes, ways, factors, elements, itemsize)

    def _factor_elements(self) -> Any:
        """Return the elements of one sample's factors."""
        return sum(math.prod(value.shape[1:]) for value in self.tensors())

    def _table_sizes(self) -> tuple[Any, ...]:
        """Return the values of the letters of its table."""
        raise NotImplementedError

    def _ways(self) -> tuple[Way, ...]:
        return tuple(self.costs.costs)

    def _products(self) -> Any:
        """Return how many numbers are multiplied for one sample's gradient."""
        return 0

    def flops(self) -> sympy.Expr:
        """Return what `dense` computes, two flops for a multiplication and an addition, in the symbolic sizes."""
        raise NotImplementedError

    def in_flop_counter(self) -> bool:
        """Return whether PyTorch's flop counter counts it: no sum, no scatter."""
        return True

    def __repr__(self) -> str:
        return f"Term({str(self.equation)!r})"


def is_one(size: object) -> bool:
    """Return whether a size is one for every batch."""
    return isinstance(size, int) and size == 1


def in_groups(rows: Tensor, size: int) -> Tensor:
    """``[n, k, ..]`` with the positions of ``size`` consecutive samples behind one another."""
    return rows.reshape(rows.shape[0] // size, size * rows.shape[1], *rows.shape[2:])
