"""What a parameter's per-sample gradients are the sum of: one part for each use, multiplied out or not."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fxgrad.gradients.rounding import MADE, is_long, rounding_of_term
from fxgrad.operators.dense import scattered_onto
from fxgrad.operators.norms import Norms, bounded, frobenius, in_a_row
from fxgrad.operators.products import product_rows, rank_one_norms
from fxgrad.operators.tables import kernels_pay, table_rows
from fxgrad.operators.windows import window_rows
from fxgrad.precision import FULL, WIDE, cast, computable, unit
from fxgrad.samples.symbols import hint
from fxgrad.terms import Factor, OneHot, Patches, Term, is_one


@dataclass(frozen=True)
class Kept:
    """A term that was multiplied out where its use was differentiated."""

    rows: Tensor  # [n, *shape]
    rounding: Tensor  # [n]: how far ‖rows_n‖ may be from the norm in exact arithmetic
    found: Tensor | None = None  # [2, n]: norms and bounds, where the operator that made the rows looked at them


class Pulled(Protocol):
    """Gradients that arrived at a function of parameters (`fxgrad.gradients.virtual`)."""

    keeps: bool

    def rows(self, slot: int, wide: bool) -> Tensor: ...

    def norms(self, slot: int) -> Norms: ...

    def rounding(self, slot: int) -> Tensor: ...

    def weighted(self, slot: int, c: Tensor, wide: bool) -> Tensor: ...

    def dot(self, slot: int, vector: Tensor) -> Tensor: ...

    def grouped(self, size: int) -> Pulled: ...


@dataclass(frozen=True)
class Virtual:
    """What reaches a parameter through a function of it: the gradients at the function's value, and the way back."""

    of: Pulled
    slot: int


Part = Term | Tensor | Kept | Virtual


def dense_of(part: Part, wide: bool = False) -> Tensor:
    """A part multiplied out, ``[n, *shape]``; ``wide``: in float64 from the start."""
    if isinstance(part, Virtual):
        return part.of.rows(part.slot, wide)
    if isinstance(part, Term):
        return term_as(part, WIDE).dense() if wide else part.dense()
    rows = part.rows if isinstance(part, Kept) else part
    return cast(rows, WIDE) if wide else rows


def summed(parts: Sequence[Part], wide: bool = False) -> Tensor:
    """Parts multiplied out and added up: ``[n, *shape]``."""
    total = dense_of(parts[0], wide)
    for part in parts[1:]:
        table = part.rows() if isinstance(part, Term) else None
        if table is not None and not wide and _is_few_of(*table, total):
            total = scattered_onto(total, *table)
        else:
            total = total + dense_of(part, wide)
    return total


def _is_few_of(rows: OneHot, g: Tensor, total: Tensor) -> bool:
    """Whether a table's gradient is mostly zeros, which need not be written to be added."""
    return total.dtype is g.dtype and total.dim() == 3 and hint(rows.ids.shape[1]) < rows.classes


def joined(parts: Sequence[Part]) -> Kept:
    """The same, with how far rounding may be off."""
    whole = multiplied_out(parts[0])
    for part in parts[1:]:
        more = multiplied_out(part)
        rows = whole.rows + more.rows
        whole = Kept(rows, whole.rounding + more.rounding + unit(rows.dtype) * frobenius(rows))
    return whole


def multiplied_out(part: Part) -> Kept:
    """One part, likewise; a few samples' are looked at while they are in the cache, where an operator makes them."""
    if isinstance(part, Kept):
        return part
    if not isinstance(part, Term):
        return Kept(dense_of(part), rounding(part))
    product, table, windows = part.product(), part.rows(), part.windows()
    if has_complex(part) or (not is_factored(part) and is_long(part)):
        return _in_wide_numbers(part)
    if product is not None and is_one(product[0].shape[1]):
        g, x = product
        rows, found = part.dense(), torch.stack(rank_one_norms(g.squeeze(1), x.squeeze(1)))
        return Kept(rows, unit(rows.dtype) * found[1], found)
    if product is not None:
        rows, found = product_rows(*product)
    elif table is not None and kernels_pay(table[1]):
        rows, found = table_rows(table[0].ids, table[1], table[0].classes, table[0].padding)
    elif windows is not None:
        g, patches = windows
        rows, found = window_rows(g, patches.input, patches.kernel, patches.settings.numbers())
    else:
        return Kept(part.dense(), rounding_of_term(part))
    rows = rows if part.shape is None else rows.reshape(rows.shape[0], *part.shape)
    return Kept(rows, found[1] - found[0], found)


def _in_wide_numbers(term: Term) -> Kept:
    """Compilers add many numbers up one after another; in float64 that is as good as exact.

    One factor alone may be products that a rule has rounded: a complex one is two products and a sum.
    """
    wide, narrow = term_as(term, WIDE), term.dtype()
    made = MADE * unit(narrow) if len(term.factors) == 1 else 0
    rows = wide.dense()
    norms, bounds = bounded(rows, rounding_of_term(wide, made))
    return Kept(rows.to(narrow), bounds - norms + unit(narrow) * norms, torch.stack([norms, bounds]))


def rounded(rows: Tensor, dtype: torch.dtype) -> Kept:
    """Gradients that were computed in float64, in a narrower dtype."""
    narrow = rows.to(dtype)
    return Kept(narrow, 1.01 * unit(dtype) * frobenius(narrow))


def is_factored(part: Part) -> bool:
    """Whether it is a term that has no product rounded: of a matrix, a table, or a convolution."""
    return isinstance(part, Term) and any(kind() is not None for kind in (part.product, part.rows, part.windows))


def rounding(part: Part) -> Tensor:
    """``[n]``: how far the norm of a part, multiplied out, may be from the one in exact arithmetic.

    What a rule returned multiplied out counts as exact.
    """
    if isinstance(part, Kept):
        return part.rounding
    if isinstance(part, Virtual):
        return part.of.rounding(part.slot)
    if isinstance(part, Term):
        return rounding_of_term(part)
    return part.new_zeros(part.shape[0], dtype=torch.float64)


def has_complex(part: Part) -> bool:
    """Whether complex values were multiplied."""
    factors = part.factors if isinstance(part, Term) else (part.rows if isinstance(part, Kept) else part,)
    return any(isinstance(factor, Tensor) and factor.is_complex() for factor in factors)


def shape_of(part: Part) -> tuple[int, ...]:
    """The shape of what a part is the gradient of, as far as it is known without multiplying out."""
    if isinstance(part, Term):
        return part.own_shape()
    rows = part.of.rows(part.slot, False) if isinstance(part, Virtual) else dense_of(part)
    return tuple(rows.shape[1:])


def in_full_precision(part: Part) -> Part:
    """Half types as float32: norms and sums are computed in it, up to the cast to the parameter's dtype."""
    if isinstance(part, Term):
        return term_as(part, FULL)
    if isinstance(part, Kept):
        return replace(part, rows=computable(part.rows))
    return computable(part) if isinstance(part, Tensor) else part


def term_as(term: Term, dtypes: Mapping[torch.dtype, torch.dtype]) -> Term:
    """A term with factors of some dtypes in others."""

    def factor(given: Factor) -> Factor:
        if isinstance(given, Patches):
            return replace(given, input=cast(given.input, dtypes))
        return cast(given, dtypes) if isinstance(given, Tensor) else given

    return Term(term.equation, *map(factor, term.factors), shape=term.shape)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Terms of one form as one term, along k; multiplied-out parts as one."""
    products: list[tuple[Tensor, Tensor]] = []
    tables: list[tuple[OneHot, Tensor]] = []
    others: list[Part] = []
    dense: Kept | None = None
    for part in parts:
        product = part.product() if isinstance(part, Term) and part.shape is None else None
        table = part.rows() if isinstance(part, Term) else None
        if product is not None:
            products.append(product)
        elif table is not None:
            tables.append(table)
        elif isinstance(part, Term | Virtual):
            others.append(part)
        else:
            dense = joined([part] if dense is None else [dense, part]) if dense or not isinstance(part, Kept) else part
    found: list[Part] = list(others)
    if products:
        pairs = [torch.cat(side, 1) if len(side) > 1 else side[0] for side in zip(*products, strict=True)]
        found.append(Term("n...o,n...i->noi", *pairs))
    for padding in dict.fromkeys(table.padding_idx for table, _ in tables):
        same = [(table, g) for table, g in tables if table.padding_idx == padding]
        ids = torch.cat([table.ids for table, _ in same], 1) if len(same) > 1 else same[0][0].ids
        g = torch.cat([g for _, g in same], 1) if len(same) > 1 else same[0][1]
        found.append(Term("n...v,n...d->nvd", OneHot(ids, same[0][0].classes, padding), g))
    if dense is not None:
        found.append(dense)
    return found


def grouped(part: Part, size: int) -> Part:
    """A part with ``size`` consecutive samples as one: their positions, one behind another."""

    def in_one(rows: Tensor) -> Tensor:
        return rows.reshape(rows.shape[0] // size, size * rows.shape[1], *rows.shape[2:])

    if isinstance(part, Virtual):
        return replace(part, of=part.of.grouped(size))
    if isinstance(part, Term):
        product, table, windows = part.product(), part.rows(), part.windows()
        if product is not None:
            return Term(part.equation, *(in_one(side) for side in product), shape=part.shape)
        if table is not None:
            ids, g = table
            return Term(part.equation, replace(ids, ids=in_one(ids.ids)), in_one(g), shape=part.shape)
        if windows is not None:
            g, patches = windows
            return Term(part.equation, in_one(g), replace(patches, input=in_one(patches.input)), shape=part.shape)
        return _term_in_groups(part, size)
    rows, off = dense_of(part), rounding(part)
    off = off + in_a_row(size, rows.dtype) * frobenius(rows)
    summed_rows = rows.reshape(rows.shape[0] // size, size, *rows.shape[1:]).sum(1)
    return Kept(summed_rows, off.reshape(-1, size).sum(1))


def _term_in_groups(term: Term, size: int) -> Term:
    """The samples of a group are one more letter to sum over."""
    inputs, _, result = term.equation.replace(" ", "").partition("->")
    letter = next(letter for letter in string.ascii_letters if letter not in term.equation)
    texts = inputs.split(",")
    factors: list[Factor] = []
    for i, (text, factor) in enumerate(zip(texts, term.factors, strict=True)):
        assert isinstance(factor, Tensor)
        if text.startswith("n"):
            texts[i] = f"n{letter}{text[1:]}"
            factor = factor.reshape(factor.shape[0] // size, size, *factor.shape[1:])
        factors.append(factor)
    return Term(f"{','.join(texts)}->{result}", *factors, shape=term.shape)
