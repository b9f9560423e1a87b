"""A sum of outer products over positions, ``D_n = Σ_k g_nk ⊗ x_nk``: the weight of a linear layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sympy import Integer
from torch import Tensor

from fxgrad.kernels.dense import products
from fxgrad.kernels.factors import Factor
from fxgrad.kernels.onednn import copies_transposed
from fxgrad.kernels.precision import WIDE, at_most, unit
from fxgrad.kernels.products import product_norms, product_rounding, product_rows, rank_one_norms
from fxgrad.kernels.sample_grams import of_products, product_gram
from fxgrad.kernels.sizes import hint
from fxgrad.kernels.sums import (
    FEW_FACTORS,
    FEW_PRODUCTS,
    fused_product_sum,
    positions,
    product_sum,
    small_product_sum,
)
from fxgrad.ops.equation import Equation
from fxgrad.terms.base import Term, in_groups, is_one
from fxgrad.terms.einsum import Einsum
from fxgrad.terms.part import ChooseWay, Chosen, Materialised, Readable
from fxgrad.terms.work import Costs, CostTable, Way, Work, e, i, k, n, o

# The Gram matrices are symmetric: half of them is computed, and the blocks on the diagonal. The norms of what is
# multiplied out are taken while it is in the cache, a few samples at a time.
_SUM = Work(product=2 * n * k * o * i, memory=2 * e * n * k * (o + i), call=Integer(6), launch=Integer(3))
COSTS = CostTable(
    "product",
    (k, o, i),
    {
        Way.RANK_ONE: Costs(Work(memory=e * n * (o + i)), Work(product=2 * n * o * i, memory=2 * e * n * (o + i))),
        Way.GRAM: Costs(
            Work(
                kernel=n * k * (k + 16) * (o + i),
                memory=e * n * k * (o + i),
                cache=e * n * k * (o + i + 2 * k),
                call=Integer(20),
                launch=Integer(12),
            ),
            _SUM,
        ),
        Way.RECOMPUTE: Costs(
            Work(
                kernel=2 * n * k * o * i,
                memory=e * n * k * (o + i),
                cache=e * n * (k * (o + i) + o * i),
                call=Integer(15),
                launch=Integer(5),
            ),
            _SUM,
        ),
        Way.MATERIALISE: Costs(
            Work(
                kernel=2 * n * k * o * i,
                memory=e * n * (k * (o + i) + o * i),
                cache=e * n * (k * (o + i) + o * i),
                call=Integer(15),
                launch=Integer(5),
            ),
            Work(memory=e * n * o * i, call=Integer(2), launch=Integer(1)),
        ),
    },
)


class Product(Einsum, Readable):
    """``n...o,n...i->noi`` of two tensors. Complex ones have the norms and the costs of an einsum."""

    costs = COSTS
    unrounded = True

    @classmethod
    def takes(cls, equation: Equation, factors: Sequence[Factor]) -> bool:
        return equation.is_product and super().takes(equation, factors)

    @classmethod
    def of(cls, g: Tensor, x: Tensor) -> Product:
        """Return the product of g ``[n, k.., o]`` and x ``[n, k.., i]``."""
        return cls("n...o,n...i->noi", g, x)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """g ``[n, k, o]`` and x ``[n, k, i]``."""
        g, x = self.tensors()
        return positions(g), positions(x)

    def _operands(self) -> tuple[Tensor, Tensor]:
        """Return what operators take: the factors as they are, where `positions` copies nothing."""
        g, x = self.tensors()
        return (g, x) if all(side.dim() == 4 and is_one(side.shape[1]) for side in (g, x)) else self.sides

    def is_rank_one(self) -> bool:
        """Return whether there is one position, of real numbers."""
        return is_one(self._table_sizes()[0]) and not self.is_complex

    def _table_sizes(self) -> tuple[Any, Any, Any]:
        """k, o, i"""
        g, x = self.tensors()
        return math.prod(g.shape[1:-1]), g.shape[-1], x.shape[-1]

    def contracted(self) -> Tensor:
        return products(*self.sides)

    def result_shape(self) -> tuple[int, ...]:
        return self._table_sizes()[1:]

    def rounding(self, made: float | None = None) -> Tensor:
        return super().rounding(made) if self.is_complex else product_rounding(*self.sides)

    def materialised(self) -> Materialised:
        if self.is_complex:
            return self._in_wide_numbers()
        if not self.is_rank_one():
            return self._measured(*product_rows(*self._operands()))
        rows, measured = self.dense(), self._rank_one_norms()
        return Materialised(rows, unit(rows.dtype) * measured[1], measured)

    def _norms(self, way: ChooseWay) -> Tensor:
        chosen = way(self)
        if chosen is Way.RANK_ONE:
            return self._rank_one_norms()
        return product_norms(*self._operands(), chosen is Way.GRAM)

    def _rank_one_norms(self) -> Tensor:
        return rank_one_norms(*self._operands())

    def weighted(self, c: Tensor, wide: bool, onednn: bool) -> Tensor:
        term = self.cast(WIDE) if wide else self  # also of a complex one
        return term._weighted(at_most(c, term.dtype().to_real()), onednn)

    def _weighted(self, c: Tensor, onednn: bool) -> Tensor:
        g, x = self._operands()
        if self._is_small_sum(onednn):
            return small_product_sum(g, x, c)
        samples, positions, *sides = self._hinted()
        if g.device.type == "cpu" and not (onednn and copies_transposed(samples * positions, *sides)):
            return fused_product_sum(g, x, c, onednn)
        total: Tensor = product_sum(g, x, c, onednn)
        return total

    def _is_small_sum(self, onednn: bool) -> bool:
        """Return whether the sum over samples is left to the compiler."""
        samples, positions, *sides = self._hinted()
        factors = samples * positions
        return factors * math.prod(sides) <= FEW_PRODUCTS or (not onednn and factors * max(sides) <= FEW_FACTORS)

    def _hinted(self) -> list[int]:
        """n, k, o, i, in numbers."""
        return [*map(hint, (self.tensors()[0].shape[0], *self._table_sizes()))]

    def dot(self, vector: Tensor) -> Tensor:
        g, x = (side.to(vector.dtype) for side in self.sides)
        return (g * (x @ vector.reshape(g.shape[2], x.shape[2]).mT)).sum((1, 2))

    def squares(self) -> Tensor | None:
        if not self.is_rank_one():
            return None
        g, x = (side.squeeze(1) for side in self.sides)
        return (g.square().t() @ x.square()).flatten()

    def gram(self, dtype: torch.dtype) -> Tensor | None:
        """``<D_n, D_m> = Σ_kl (g_nk·g_ml)(x_nk·x_ml)``, where that takes fewer flops than D itself."""
        if self.is_complex:
            return None
        g, x = (side.to(dtype) for side in self.sides)
        if self.is_rank_one():
            g, x = g.squeeze(1), x.squeeze(1)
            return (g @ g.t()) * (x @ x.t())
        samples, positions, fan_out, fan_in = self._hinted()
        if samples * positions**2 * (fan_out + fan_in) >= (samples + positions) * fan_out * fan_in:
            return None
        gram: Tensor = product_gram(g, x)
        return gram

    def with_others(self, others: Readable) -> Tensor | None:
        if not isinstance(others, Product) or self.is_complex or others.is_complex:
            return None
        (g, x), (h, y) = self.sides, others.sides
        (n, k, fan_out), (m, of_others, _), fan_in = g.shape, h.shape, x.shape[2]
        if n * k * m * of_others * (fan_out + fan_in) >= (n * k + m * of_others + n * m) * fan_out * fan_in:
            return None
        return of_products(g, x, h, y)

    def grouped(self, size: int) -> Term:
        return self.with_factors(*(in_groups(side, size) for side in self.sides))

    def transposed(self) -> Product:
        """Return the gradients of the transposed matrix."""
        return Product.of(*reversed(self.sides))

    def merge_key(self) -> tuple[Any, ...]:
        return (1,) if self.shape is None else super().merge_key()

    @classmethod
    def merged(cls, parts: Sequence[Product]) -> Product:
        """Return the positions of one behind those of another."""
        return cls.of(*(torch.cat(side, 1) for side in zip(*(part.sides for part in parts), strict=True)))

    @property
    def has_blocks(self) -> bool:
        return self.shape is None

    def block(self, starts: Sequence[int], sizes: Sequence[int]) -> Product:
        sides = zip(self.sides, starts, sizes, strict=True)
        return Product.of(*(side[:, :, start : start + size] for side, start, size in sides))

    def padded(self, starts: Sequence[int], sizes: Sequence[int]) -> Product:
        sides = zip(self.sides, starts, sizes, strict=True)
        return Product.of(
            *(
                F.pad(side, (start, size - start - side.shape[2])) if side.shape[2] != size else side
                for side, start, size in sides
            )
        )

    def read(self, chosen: Chosen, width: int) -> Tensor:
        g, x = self.sides
        return (g[:, :, chosen].mT @ x).flatten(1)

    def pack(self) -> tuple[list[Tensor], list[int]]:
        return list(self.sides), []

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Product:
        return cls.of(*tensors)

    def _ways(self) -> tuple[Way, ...]:
        return tuple(way for way in COSTS.costs if way is not Way.RANK_ONE or self.is_rank_one())
