"""Rules of ATen ops, by name: the sample ids of the outputs from those of the operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxgrad.proof.calls import Call, Reason, Undecided, name_of
from fxgrad.proof.origins import SUM, any_samples, compact, joined, no_samples
from fxgrad.proof.rules import along, collectives, layers, lookups, movement, own, pointwise, products
from fxgrad.proof.rules.registry import RULES, UNREAD, Rule

__all__ = [
    "RULES",
    "along",
    "applied",
    "collectives",
    "layers",
    "lookups",
    "movement",
    "of",
    "own",
    "pointwise",
    "products",
]


def of(func: Any) -> Rule | None:
    """Return the rule of an op; ops with ATen's tag `pointwise` share one rule."""
    rule = RULES.get(name_of(func))
    if rule is None and torch.Tag.pointwise in func.tags and func.namespace in ("aten", "prims"):
        return pointwise.pointwise
    return rule


def applied(rule: Rule, call: Call) -> list[Tensor]:
    """Return the ids of each output by a rule.

    Refuse an operand with samples that the rule did not read, and a size that is not linear in the batch size.
    """
    call.check_sizes()
    result = rule(call)
    unread = UNREAD.get(rule, frozenset())
    rest = [(name, one) for name, one in call.tensors if name not in unread and id(one) not in call.looked_at]
    for name, tensor in rest:
        if bool(call.of(tensor).any()):
            raise Undecided(f"fxgrad does not know what the samples in its {name} do", Reason.NO_RULE)
    pairs = zip(result if isinstance(result, list) else [result], call.outputs, strict=True)
    return [_settled(call, ids, out) if isinstance(out, Tensor) else ids for ids, out in pairs]


def _settled(call: Call, ids: Tensor, out: Tensor) -> Tensor:
    """Return compact ids of an output's rank; MANY for ids that do not fit its shape."""
    if any(type(size) is int and size == 0 for size in out.shape):
        return no_samples(out.dim())
    shape = call.trial.shape(out.shape)
    if ids.dim() != len(shape) or any(size not in (1, full) for size, full in zip(ids.shape, shape, strict=True)):
        return any_samples(out.dim())
    return compact(_held(call, ids, out)).contiguous()


def _held(call: Call, ids: Tensor, out: Tensor) -> Tensor:
    """Turn SUM into MANY if the output's dtype may round, wrap or truncate the sum."""
    if out.is_floating_point() or out.is_complex() or not bool((ids == SUM).any()):
        return ids
    summed = (tensor for _, tensor in call.tensors if bool((call.of(tensor) == SUM).any()))
    whole = all(torch.promote_types(tensor.dtype, out.dtype) == out.dtype for tensor in summed)
    return ids if whole and out.dtype != torch.bool else joined(ids)
