"""The table of rules: what an ATen op makes of the samples in its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxgrad.independence.calls import Call

Rule = Callable[[Call], Tensor | list[Tensor]]
RULES: dict[str, Rule] = {}
UNREAD: dict[Rule, frozenset[str]] = {}


def follows(*names: str, unread: Sequence[str] = ()) -> Callable[[Rule], Rule]:
    """Register a rule for ATen ops, by name: it returns the ids of each output, from those of the operands.

    The values of `unread` arguments have no part in the outputs. The samples in any other the rule has to ask for.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = rule
        if unread:
            UNREAD[rule] = frozenset(unread)
        return rule

    return register


def names_of(text: str) -> list[str]:
    return text.split()


def rule_of(func: Any) -> Rule | None:
    space, name = str(func._schema.name).split("::")
    return RULES.get(name if space in ("aten", "prims") else f"{space}::{name}")
