"""Rows of a table that a sample reads, ``D_n = Σ_k onehot(ids_nk) ⊗ g_nk``: the weight of an embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from sympy import Integer
from torch import Tensor

from fxgrad.kernels.dense import scattered, scattered_onto
from fxgrad.kernels.factors import Factor, OneHot
from fxgrad.kernels.sample_grams import of_tables, table_gram
from fxgrad.kernels.sizes import hint
from fxgrad.kernels.sums import small_table_sum
from fxgrad.kernels.tables import kernels_pay, lines_of_table, rounding_of_rows, row_norms, table_rows, table_sum
from fxgrad.ops.equation import Equation
from fxgrad.samples.symbols import elements
from fxgrad.terms.base import Term, in_groups
from fxgrad.terms.part import ChooseWay, Chosen, Materialised, Readable
from fxgrad.terms.work import Costs, CostTable, Way, Work, d, e, k, n, v

# k rows are read, and v d numbers are a gradient.
COSTS = CostTable(
    "table",
    (k, v, d),
    {
        Way.ROWS: Costs(
            # finding an id takes as long as 600 bytes
            Work(cache=(3 * e * d + 600) * n * k, call=Integer(15), launch=Integer(15)),
            Work(memory=2 * e * n * k * d + 2 * e * v * d, call=Integer(4), launch=Integer(4)),
        ),
        Way.MATERIALISE: Costs(
            Work(memory=e * n * v * d, cache=2 * e * n * k * d, call=Integer(6), launch=Integer(6)),
            Work(memory=e * n * v * d, call=Integer(2), launch=Integer(2)),
        ),
    },
)


class Table(Term, Readable):
    """``n...v,n...d->nvd`` of a `OneHot` and a tensor."""

    costs = COSTS
    factor_types = (OneHot, Tensor)
    unrounded = True

    rows: OneHot  # of ids [n, k]
    g: Tensor  # [n, k, d]

    def __init__(self, equation: str | Equation, *factors: Factor, shape: Sequence[int] | None = None) -> None:
        rows, g = factors
        assert isinstance(rows, OneHot) and isinstance(g, Tensor)
        samples, positions = rows.ids.shape[0], math.prod(rows.ids.shape[1:])
        self.g = g.reshape(samples, positions, math.prod(g.shape[rows.ids.dim() :]))
        self.rows = replace(rows, ids=rows.ids.reshape(samples, positions))
        super().__init__(equation, self.rows, self.g, shape=shape)

    @classmethod
    def of(cls, rows: OneHot, g: Tensor) -> Table:
        """Return the gradient of a table from ids ``[n, k..]`` and g ``[n, k.., d..]``."""
        return cls("n...v,n...d->nvd", rows, g)

    def _table_sizes(self) -> tuple[Any, Any, Any]:
        """k, v, d"""
        return self.g.shape[1], self.rows.classes, self.g.shape[2]

    def _operands(self) -> tuple[Tensor, Tensor, int, int]:
        """Return what operators take: ids, g, the number of rows, and the padding's id."""
        return self.rows.ids, self.g, self.rows.classes, self.rows.padding

    def contracted(self) -> Tensor:
        return scattered(self.rows, self.g)

    def result_shape(self) -> tuple[int, ...]:
        return self.rows.classes, self.g.shape[2]

    def rounding(self, made: float | None = None) -> Tensor:
        return rounding_of_rows(*self._operands())

    def _materialised(self) -> Materialised:
        operands = self._operands()
        return self._measured(*table_rows(*operands)) if kernels_pay(operands[1]) else super()._materialised()

    def added_to(self, total: Tensor) -> Tensor:
        """Add a gradient that is mostly zeros without writing them."""
        in_place = total.dtype is self.dtype() and self.own_shape() == self.result_shape()
        few = in_place and hint(self.g.shape[1]) < self.rows.classes
        return scattered_onto(total, self.rows, self.g) if few else super().added_to(total)

    def _norms(self, way: ChooseWay) -> Tensor:
        return row_norms(*self._operands())

    def _weighted(self, c: Tensor, onednn: bool) -> Tensor:
        ids, g, *sizes = self._operands()
        total: Tensor = (table_sum if kernels_pay(g) else small_table_sum)(ids, g, c, *sizes)
        return total

    def dot(self, vector: Tensor) -> Tensor:
        rows = self.rows
        read = vector.reshape(rows.classes, -1)[rows.ids]
        if rows.padding_idx is not None:
            read = read.masked_fill((rows.ids == rows.padding_idx).unsqueeze(2), 0)
        return (self.g * read).sum((1, 2))

    def gram(self, dtype: torch.dtype) -> Tensor | None:
        """As of a product, whose x is one-hot."""
        ids, g, classes, padding = self._operands()
        if hint(ids.shape[1]) ** 2 >= classes:
            return None
        gram: Tensor = table_gram(ids, g.to(dtype), padding)
        return gram

    def with_others(self, others: Readable) -> Tensor | None:
        if not isinstance(others, Table) or self.rows.ids.shape[1] * others.rows.ids.shape[1] >= self.rows.classes:
            return None
        return of_tables(self.rows.ids, self.g, others.rows.ids, others.g, self.rows.padding)

    def grouped(self, size: int) -> Term:
        return self.with_factors(replace(self.rows, ids=in_groups(self.rows.ids, size)), in_groups(self.g, size))

    def merge_key(self) -> tuple[Any, ...]:
        return 2, self.result_shape(), self.own_shape(), self.rows.padding_idx

    @classmethod
    def merged(cls, parts: Sequence[Table]) -> Table:
        """Return the positions of one behind those of another."""
        ids, g = (torch.cat(each, 1) for each in zip(*((part.rows.ids, part.g) for part in parts), strict=True))
        return parts[0].with_factors(replace(parts[0].rows, ids=ids), g)

    def read(self, chosen: Chosen, width: int) -> Tensor:
        return lines_of_table(self.rows.ids, self.g, self.rows.padding, chosen)

    def touched(self) -> Tensor | None:
        return self.rows.ids

    def pack(self) -> tuple[list[Tensor], list[int]]:
        ids, g, *numbers = self._operands()
        return [ids, g], numbers

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Table:
        (ids, g), (classes, padding) = tensors, numbers
        return cls.of(OneHot(ids, classes, padding if padding >= 0 else None), g)

    def _factor_elements(self) -> Any:
        return self.g.shape[1] * (self.g.shape[2] + 2)  # an id is as large as two numbers

    def in_flop_counter(self) -> bool:
        return False

    def flops(self) -> sympy.Expr:
        return elements(self.g)
