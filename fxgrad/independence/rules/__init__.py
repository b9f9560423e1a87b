"""What ATen ops make of the samples in their operands, by name."""

from __future__ import annotations

from typing import Any

import torch

from fxgrad.independence.rules import along, layers, lookups, movement, own, pointwise, products
from fxgrad.independence.rules.registry import RULES, Rule, rule_of

__all__ = ["RULES", "along", "ignores", "layers", "lookups", "movement", "of", "own", "pointwise", "products"]


def ignores(name: str) -> bool:
    """Whether an op reads the form alone of what its rule does not look at."""
    return RULES.get(name) in (pointwise.form_alone, pointwise.copy, own.packed_lengths)


def of(func: Any) -> Rule | None:
    """The rule of an op; one that ATen tags as pointwise needs none of its own."""
    found = rule_of(func)
    if found is None and torch.Tag.pointwise in func.tags and func.namespace in ("aten", "prims"):
        return pointwise.pointwise
    return found
