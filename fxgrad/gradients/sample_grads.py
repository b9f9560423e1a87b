"""The per-sample gradients of one parameter, as the sum of parts that were not multiplied out.

A quantity asks for what it needs: the gradients themselves, their norms, a weighted sum over samples, their
products with a given tensor. Each is computed from the parts in the way that `fxgrad.costs.choices` chose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fxgrad.costs.choices import Ways
from fxgrad.costs.contractions import Way, contraction_of
from fxgrad.costs.machines import Machine
from fxgrad.gradients.columns import by_columns
from fxgrad.gradients.parts import (
    Kept,
    Part,
    Virtual,
    dense_of,
    grouped,
    has_complex,
    is_factored,
    joined,
    merged,
    multiplied_out,
    rounding,
    summed,
    term_as,
)
from fxgrad.operators.norms import Norms, as_vectors, bounded, frobenius, gamma
from fxgrad.operators.products import product_norms, rank_one_norms
from fxgrad.operators.sums import (
    FEW_FACTORS,
    FEW_PRODUCTS,
    SMALL,
    dense_sum,
    product_sum,
    small_product_sum,
    small_sum,
    small_table_sum,
    window_sum,
)
from fxgrad.operators.tables import kernels_pay, row_norms, table_sum, without
from fxgrad.operators.windows import window_norms
from fxgrad.precision import WIDE, accumulating, at_most
from fxgrad.samples.symbols import hint
from fxgrad.terms import Term


@dataclass
class SampleGrads:
    """``D_n = Σ parts``: the gradients ``[n, *shape]`` of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    n: int
    like: Tensor  # any tensor on the gradients' device
    parts: list[Part] = field(default_factory=list)
    ways: Ways = field(default_factory=Ways)  # what chooses
    scale: float = 1  # D_n is this times the parts' sum: of all that is asked for, no factor is rounded for it

    @property
    def accumulating(self) -> torch.dtype:
        """The dtype that norms and sums are taken in."""
        return accumulating(self.dtype)

    def dense(self) -> Tensor:
        """``[n, *shape]``"""
        if not self.parts:
            return self.like.new_zeros(self.n, *self.shape, dtype=self.dtype)
        return self._scaled(summed(self.parts).reshape(self.n, *self.shape))

    def grouped(self, size: int) -> SampleGrads:
        """The same with ``size`` consecutive samples as one."""
        if size == 1:
            return self
        parts = [grouped(part, size) for part in self.parts]
        return replace(self, n=self.n // size, parts=parts, ways=self.ways.grouped(size))

    def _scaled(self, found: Tensor, times: int = 1) -> Tensor:
        return found if isinstance(self.scale, int | float) and self.scale == 1 else found * self.scale**times

    def norms(self) -> Norms:
        """``[n]`` each, in float64: the norms, and bounds that hold for the gradients in exact arithmetic."""
        norms, bounds = self._norms()
        return self._scaled(norms), self._scaled(bounds)

    def _norms(self) -> Norms:
        parts = merged(self.parts)
        if not parts:
            zeros = self.like.new_zeros(self.n, dtype=torch.float64)
            return zeros, zeros
        if len(parts) == 1:
            return norms_of(parts[0], self.name, self.ways)
        terms = [part for part in parts if isinstance(part, Term)]
        if len(terms) == len(parts) == 2:
            product, table = terms  # as `merged` has them in order
            if table.rows() is not None and product.product() is not None:
                return _norms_of_tied(table, product, self.name, self.ways)
        self.ways.multiplied_out(self.name)
        wide = any(isinstance(part, Virtual) and not part.of.keeps for part in parts)
        if not wide:
            return norms_of(joined(parts))
        rows = summed(self.parts, wide=True)
        off = [rounding(part) for part in parts if not (isinstance(part, Virtual) or is_factored(part))]
        return bounded(rows, sum(off, rows.new_zeros(self.n, dtype=torch.float64)))

    def weighted(self, c: Tensor, wide: bool = False) -> Tensor:
        """``Σ_n c_n D_n``, ``[*shape]``, in the parameter's dtype; ``wide``: in float64, on its way to one."""
        dtype = WIDE.get(self.dtype, self.dtype) if wide else self.dtype
        bent = any(isinstance(part, Virtual) and not part.of.keeps for part in self.parts)
        total: Tensor | None = None
        c = self._scaled(at_most(c, self.accumulating))
        for part in merged(self.parts):
            found = _weighted(part, c, wide or bent, self.ways).reshape(self.shape)
            total = found if total is None else total + found
        if total is None:
            return self.like.new_zeros(self.shape, dtype=dtype)
        if bent and not wide:  # of a derivative that is infinite no weight of 0 makes 0
            total = torch.where((c == 0).all(), 0, total)
        return total.to(dtype)

    def dot(self, vector: Tensor) -> Tensor:
        """``<D_n, vector>`` of a tensor ``[*shape]``: ``[n]``."""
        found = [_dot(part, vector.to(self.accumulating)) for part in merged(self.parts)]
        if not found:
            return self.like.new_zeros(self.n, dtype=self.accumulating)
        return self._scaled(torch.stack(found).sum(0))

    def squared(self) -> Tensor:
        """``Σ_n D_n²``, element by element, ``[*shape]``."""
        parts = merged(self.parts)
        pair = _rank_one(parts)
        if pair is not None:
            g, x = pair
            return self._scaled((g.square().t() @ x.square()).reshape(self.shape), 2)
        return self._scaled(self._by_columns(parts, "squares").reshape(self.shape), 2)

    def variance(self) -> Tensor:
        """The unbiased variance over samples, element by element, ``[*shape]``."""
        return self._scaled(self._by_columns(merged(self.parts), "variance").reshape(self.shape), 2)

    def gram(self) -> Tensor:
        """``<D_n, D_m>``, ``[n, n]``."""
        parts = merged(self.parts)
        pair = _rank_one(parts)
        if pair is not None:
            g, x = (side.to(self.accumulating) for side in pair)
            return self._scaled((g @ g.t()) * (x @ x.t()), 2)
        return self._scaled(self._by_columns(parts, "gram"), 2)

    def projected(self, dim: int, seed: int, key: int) -> Tensor:
        """The product with a matrix of signs that (seed, key) names, ``[n, dim]``."""
        return self._scaled(self._by_columns(merged(self.parts), "projection", dim, seed, key))

    def _by_columns(self, parts: Sequence[Part], name: str, *settings: int) -> Tensor:
        if not parts:
            parts = [self.dense()]
        dim, seed, key = settings or (0, 0, 0)
        return by_columns(parts, (name, dim, seed, key), self.accumulating)


def _rank_one(parts: Sequence[Part]) -> tuple[Tensor, Tensor] | None:
    """g ``[n, o]`` and x ``[n, i]`` where the gradients are g_n ⊗ x_n; None for others.

    On any machine squares and products of such gradients are cheaper to have from the factors: nothing is chosen.
    """
    if len(parts) != 1 or not isinstance(parts[0], Term) or Way.RANK_ONE not in contraction_of(parts[0]).ways:
        return None
    pair = parts[0].product()
    assert pair is not None
    g, x = pair
    return g.squeeze(1), x.squeeze(1)


def kept(part: Part, name: str = "", ways: Ways = Ways()) -> Part:  # noqa: B008 - immutable
    """A part of one parameter as it waits for the end of the backward: as factors, or multiplied out."""
    if isinstance(part, Term) and ways.of(name, part) is Way.MATERIALISE:
        return multiplied_out(part)
    return part


def norms_of(part: Part, name: str = "", ways: Ways = Ways()) -> Norms:  # noqa: B008 - immutable
    """Norms and bounds of one part alone, ``[n]`` each."""
    if isinstance(part, Virtual):
        return part.of.norms(part.slot)
    if isinstance(part, Kept) and part.found is not None:
        return part.found[0], part.found[1]
    if not isinstance(part, Term):
        return bounded(dense_of(part), rounding(part))
    product, table, windows = part.product(), part.rows(), part.windows()
    if product is None and has_complex(part):
        return norms_of(multiplied_out(part))
    if product is not None:
        g, x = product
        way = ways.of(name, part, waits=True)
        if way is Way.RANK_ONE:
            return rank_one_norms(g.squeeze(1), x.squeeze(1))
        found = product_norms(g, x, way is Way.GRAM)
        return found[0], found[1]
    if table is not None:
        rows, g = table
        found = row_norms(rows.ids, g, rows.classes, rows.padding)
        return found[0], found[1]
    if windows is not None:
        g, patches = windows
        gram = ways.of(name, part, waits=True) is Way.GRAM
        found = window_norms(g, patches.input, patches.kernel, patches.settings.numbers(), gram)
        return found[0], found[1]
    return norms_of(multiplied_out(part))


def _norms_of_tied(table: Term, product: Term, name: str, ways: Ways) -> Norms:
    """An embedding tied to a head: ``‖E + H‖² = ‖E‖² + ‖H‖² + 2 <E, H>``, the last one gather of a Gram matrix."""
    rows, pair = table.rows(), product.product()
    assert rows is not None and pair is not None
    (ids, g), (h, x) = rows, pair
    own = norms_of(table, name, ways), norms_of(product, name, ways)
    g = without(ids.padding, ids.ids, g)
    met = h.gather(2, ids.ids.unsqueeze(1).expand(-1, h.shape[1], -1))  # [n, l, k]
    gram = x @ g.mT
    products = (met * gram).double()
    cross = products.sum((1, 2))
    lengths = frobenius(x.flatten(0, 1)).view(x.shape[:2]).unsqueeze(2) * frobenius(g.flatten(0, 1)).view(
        g.shape[0], 1, -1
    )
    slack = gamma(x.shape[2], x.dtype) * (met.double().abs() * lengths).sum((1, 2))
    square, bound = (one.square() + other.square() + 2 * cross for one, other in zip(*own, strict=True))
    bound = bound + 2 * slack * (1 + 1e-9)
    return square.clamp(min=0).sqrt(), bound.clamp(min=0).sqrt() * (1 + 1e-12)


def _weighted(part: Part, c: Tensor, wide: bool, ways: Ways) -> Tensor:
    """``Σ_n c_n`` part_n, which rounds no more than the part's norm takes into account."""
    if isinstance(part, Virtual):
        return part.of.weighted(part.slot, c, wide)
    if not isinstance(part, Term):
        return _dense_sum(dense_of(part, wide), c)
    part = term_as(part, WIDE) if wide else part
    product, table, windows = part.product(), part.rows(), part.windows()
    if product is None and has_complex(part):
        return _dense_sum(part.dense(), c)
    c = at_most(c, part.dtype().to_real())
    if product is not None:
        g, x = product
        if _is_small_sum(g, x, ways.machine):
            return small_product_sum(g, x, c)
        found: Tensor = product_sum(g, x, c, ways.machine.onednn_pays())
        return found
    if table is not None:
        rows, g = table
        table_sums = table_sum if kernels_pay(g) else small_table_sum
        found = table_sums(rows.ids, g, c, rows.classes, rows.padding)
        return found
    if windows is not None:
        g, patches = windows
        found = window_sum(g, patches.input, c, patches.kernel, patches.settings.numbers())
        return found
    return _dense_sum(part.dense(), c)


def _is_small_sum(g: Tensor, x: Tensor, machine: Machine) -> bool:
    """Whether the sum of g ⊗ x is left to the compiler."""
    n, k, o, i = (hint(size) for size in (*g.shape, x.shape[2]))
    return n * k * o * i <= FEW_PRODUCTS or (not machine.onednn_pays() and n * k * max(o, i) <= FEW_FACTORS)


def _dense_sum(rows: Tensor, c: Tensor) -> Tensor:
    if math.prod(hint(size) for size in rows.shape[1:]) <= SMALL:
        return small_sum(rows, c)
    found: Tensor = dense_sum(rows, c)
    return found


def _dot(part: Part, vector: Tensor) -> Tensor:
    """The product with a tensor of the parameter's shape: the op's output with the tensor in W's place, times g."""
    if isinstance(part, Virtual):
        return part.of.dot(part.slot, vector)
    if not isinstance(part, Term):
        return as_vectors(dense_of(part) * vector).sum(1)
    product, table, windows = part.product(), part.rows(), part.windows()
    if product is not None:
        g, x = product
        matrix = vector.reshape(g.shape[2], x.shape[2])
        return (g.to(vector.dtype) * (x.to(vector.dtype) @ matrix.mT)).sum((1, 2))
    if table is not None:
        rows, g = table
        read = vector.reshape(rows.classes, -1)[rows.ids]
        if rows.padding_idx is not None:
            read = read.masked_fill((rows.ids == rows.padding_idx).unsqueeze(2), 0)
        return (g * read).sum((1, 2))
    if windows is not None:
        g, patches = windows
        x, vector = patches.input.flatten(0, 1).to(vector.dtype), vector.reshape(patches.kernel)
        y = torch.convolution(x, vector, None, *patches.settings)
        return (g.flatten(0, 1) * y).view(g.shape[0], -1).sum(1)
    return as_vectors(part.dense() * vector).sum(1)
