"""Sums of the parts of one parameter's gradients: multiplied out, or still as terms."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fxgrad.kernels.norms import frobenius
from fxgrad.kernels.precision import unit
from fxgrad.terms import Materialised, Part, Term, part_of


def summed(parts: Sequence[Part | Tensor], wide: bool = False) -> Tensor:
    """Parts multiplied out and added up: ``[n, *shape]``."""
    first, *others = map(part_of, parts)
    total = first.dense(wide)
    for part in others:
        total = total + part.dense(wide) if wide else part.added_to(total)
    return total


def joined(parts: Sequence[Part]) -> Materialised:
    """The same, with how far rounding may be off."""
    whole = parts[0].materialised()
    for part in parts[1:]:
        more = part.materialised()
        rows = whole.rows + more.rows
        whole = Materialised(rows, whole.rounding() + more.rounding() + unit(rows.dtype) * frobenius(rows))
    return whole


def rounded(rows: Tensor, dtype: torch.dtype) -> Materialised:
    """Gradients that were computed in float64, in a narrower dtype."""
    narrow = rows.to(dtype)
    return Materialised(narrow, 1.01 * unit(dtype) * frobenius(narrow))


def merged(parts: Sequence[Part]) -> list[Part]:
    """Terms of one form as one term, along k; multiplied-out parts as one. In the order of the kinds."""
    others: list[Part] = []
    groups: dict[Hashable, list[Part]] = {}
    materialised: list[Part] = []
    for part in parts:
        key = part.merge_key()
        if isinstance(part, Materialised):
            materialised.append(part)
        elif key is None:
            others.append(part)
        else:
            groups.setdefault(key, []).append(part)
    ordered = sorted(groups.values(), key=lambda group: Term.kinds.index(type(group[0])))  # type: ignore[arg-type]
    terms = [type(group[0]).merged(group) for group in ordered]
    return [*others, *terms, *([joined(materialised)] if materialised else [])]
