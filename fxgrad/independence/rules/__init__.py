"""What ATen ops make of the samples in their operands, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxgrad.independence.calls import Call, Undecided
from fxgrad.independence.origins import SUM, joined
from fxgrad.independence.rules import along, layers, lookups, movement, own, pointwise, products
from fxgrad.independence.rules.registry import RULES, UNREAD, Rule, rule_of

__all__ = ["RULES", "along", "applied", "layers", "lookups", "movement", "of", "own", "pointwise", "products"]


def of(func: Any) -> Rule | None:
    """The rule of an op; one that ATen tags as pointwise needs none of its own."""
    found = rule_of(func)
    if found is None and torch.Tag.pointwise in func.tags and func.namespace in ("aten", "prims"):
        return pointwise.pointwise
    return found


def applied(rule: Rule, call: Call) -> list[Tensor]:
    """The ids of each output, as a rule says.

    Refused is an operand whose samples the rule did not ask for, and a size that more samples may alter in another way.
    """
    call.check_sizes()
    given = rule(call)
    found = given if isinstance(given, list) else [given]
    unread = UNREAD.get(rule, frozenset())
    rest = [(name, one) for name, one in call.tensors() if name not in unread and id(one) not in call.looked_at]
    for name, tensor in rest:
        if bool(call.of(tensor).any()):
            raise Undecided(f"nobody has said what the samples in its {name} do")
    return [_held(call, ids, i) for i, ids in enumerate(found)]


def _held(call: Call, ids: Tensor, i: int) -> Tensor:
    """A sum that was rounded, wrapped or made a bool is a sum no more."""
    out = call.outputs[i]
    if not isinstance(out, Tensor) or out.is_floating_point() or out.is_complex() or not bool((ids == SUM).any()):
        return ids
    summed = (tensor for _, tensor in call.tensors() if bool((call.of(tensor) == SUM).any()))
    whole = all(torch.promote_types(tensor.dtype, out.dtype) == out.dtype for tensor in summed)
    return ids if whole and out.dtype != torch.bool else joined(ids)
