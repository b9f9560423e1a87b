"""Sums of the parts of one parameter's gradients: multiplied out, or still as terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.kernels.norms import frobenius
from fxgrad.kernels.precision import unit
from fxgrad.terms import Materialised, Part, part_of


def summed(parts: Sequence[Part | Tensor], wide: bool = False) -> Tensor:
    """Parts multiplied out and added up: ``[n, *shape]``."""
    first, *others = map(part_of, parts)
    total = first.dense(wide)
    for part in others:
        total = total + part.dense(wide) if wide else part.added_to(total)
    return total


def rounded(rows: Tensor, dtype: torch.dtype) -> Materialised:
    """Gradients that were computed in float64, in a narrower dtype."""
    narrow = rows.to(dtype)
    return Materialised(narrow, 1.01 * unit(dtype) * frobenius(narrow))


def merged(parts: Sequence[Part]) -> list[Part]:
    """Terms of one form as one term, along k; multiplied-out parts as one. In the order of the kinds."""
    groups: dict[tuple[Any, ...], list[Part]] = {}
    for part in parts:
        groups.setdefault(part.merge_key(), []).append(part)
    ordered = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
    return [type(group[0]).merged(group) if len(group) > 1 else group[0] for group in ordered]
