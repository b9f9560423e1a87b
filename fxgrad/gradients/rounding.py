"""How far rounding may put the norm of a multiplied-out term from the one in exact arithmetic.

A sum of m products errs by at most γ(m) times the sum of their absolute values (`fxgrad.operators.norms`). Of one
factor, or of several that are multiplied entry by entry, those are added up beside the sum itself. Of others, the
contraction of absolute values is at most the product of the factors' norms (Cauchy and Schwarz), times √m where m
values are added up that meet no other factor. Of one factor alone, of one position, nothing is computed at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxgrad.operators.norms import CHAIN, frobenius, in_a_row
from fxgrad.operators.products import product_rounding
from fxgrad.operators.tables import rounding_of_rows
from fxgrad.operators.windows import window_rounding
from fxgrad.precision import unit
from fxgrad.terms import Term, is_one

MADE = 4  # roundings that an entry of a term's one factor may have behind it: a rule's product, a complex one


def rounding_of_term(term: Term, made: float | None = None) -> Tensor:
    """``[n]`` in float64; ``made``: how far the entries of its one factor may be off, relative to themselves."""
    pair, table, windows = term.product(), term.rows(), term.windows()
    if pair is not None and not any(side.is_complex() for side in pair):
        return product_rounding(*pair)
    if table is not None:
        rows, g = table
        return rounding_of_rows(rows.ids, g, rows.classes, rows.padding)
    if windows is not None:
        g, patches = windows
        met = patches.input if patches.settings.transposed else g
        positions = [met.shape[1], *met.shape[3:]]
        copies = math.prod(patches.kernel[2:])
        return window_rounding(frobenius(g), frobenius(patches.input), positions, copies, g.dtype)
    factors = [factor for factor in term.factors if isinstance(factor, Tensor)]
    letters, _ = term.letters()
    sizes, added = term.sizes(), _added(term)
    if len(factors) == 1 and all(is_one(sizes[letter]) for letter in added):
        return factors[0].new_zeros(factors[0].shape[0], dtype=torch.float64)  # nothing is multiplied or added up
    if made is None:
        made = MADE * unit(term.dtype()) if len(factors) == 1 else 0
    relative = in_a_row(math.prod(sizes[letter] for letter in added), term.dtype()) + made
    if all(names == letters[0] for names in letters):
        return relative * frobenius(Term(term.equation, *(factor.abs() for factor in factors)).dense())
    alone = [letter for letter in added if sum(letter in names for names in letters) == 1]
    times = math.prod(sizes[letter] for letter in alone)
    found: Tensor = torch.ones((), dtype=torch.float64, device=factors[0].device) * relative * times**0.5
    for names, factor in zip(letters, factors, strict=True):
        found = found * frobenius(factor if names[0] == "n" else factor.unsqueeze(0))
    return found


def is_long(term: Term) -> bool:
    """Whether more products are added up than a kernel would add one after another."""
    sizes = term.sizes()
    return bool(math.prod(sizes[letter] for letter in _added(term)) > CHAIN)


def _added(term: Term) -> list[str]:
    """The letters that the result does not have."""
    _, result = term.letters()
    return [letter for letter in term.sizes() if letter not in result]
