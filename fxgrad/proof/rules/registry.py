"""The table of rules: ATen op -> function from operands' sample ids to the outputs'."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxgrad.proof.calls import Call

Rule = Callable[[Call], Tensor | list[Tensor]]
RULES: dict[str, Rule] = {}
UNREAD: dict[Rule, frozenset[str]] = {}


def follows(names: str, *, unread: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for ops, by name; it returns the ids of each output from those of the operands.

    The outputs do not depend on the values of ``unread`` arguments. The rule has to read the ids of all others.
    """

    def register(rule: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, name
            RULES[name] = rule
        if unread:
            UNREAD[rule] = frozenset(unread.split())
        return rule

    return register
