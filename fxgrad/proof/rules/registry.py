"""The table of rules: ATen op -> function from operands' sample ids to the outputs'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxgrad.host.ops import schema
from fxgrad.proof.calls import Call

Rule = Callable[[Call], Tensor | list[Tensor]]
RULES: dict[str, Rule] = {}
UNREAD: dict[Rule, frozenset[str]] = {}


def follows(*names: str, unread: Sequence[str] = ()) -> Callable[[Rule], Rule]:
    """Register a rule for ATen ops, by name; it returns the ids of each output from those of the operands.

    The outputs do not depend on the values of ``unread`` arguments. The rule has to read the ids of all others.
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
    space, name = str(schema(func).name).split("::")
    return RULES.get(name if space in ("aten", "prims") else f"{space}::{name}")
