"""Teaching fxgrad an op of one's own: its rule, or that it treats samples alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import torch

from fxgrad.errors import OptionError, RuleError, nearest
from fxgrad.ops.calls import op_name
from fxgrad.ops.families import Family, family_of, register_family
from fxgrad.rules.registry import rule

R = TypeVar("R", bound=Callable[..., Mapping[str, Any]])


def implements_per_sample_grads(
    op: Any, *, of: Iterable[str] | None = None, override: bool = False
) -> Callable[[R], R]:
    """Register a per-sample-gradient rule for an op of your own: a function or a custom op.

    The decorated function gets ``g``, the gradient of the op's output, and the op's arguments by name.
    ``g`` and every argument that holds samples have the samples first. Row n is what the op sees when it
    is called on sample n alone, with the sample dimension kept, of size 1. The function returns a dict from
    argument name to the parameter's gradient: a tensor ``[n, *shape]`` or a `fxgrad.Term`.

    The rule is traced once. The numbers that it reads have to stay: fxgrad refuses a step after a change.

    Args:
        op: the function or custom op. A plain Python function becomes one node of the graph.
        of: the arguments that the rule differentiates by; None for all that the function names besides ``g``.
        override: whether a rule that is registered already is replaced.

    Returns:
        A decorator, which returns the function unaltered.

    Raises:
        RuleError: the op has a rule and override is False, or ``of`` names what the rule does not take.
        OptionError: the op is a name or a class.

    Guarantees:
        You promise that the op treats samples alone. `fxgrad.testing.check_rule` tries the rule on numbers.

    >>> def scale(x, w):
    ...     return x * w.exp()
    >>> @implements_per_sample_grads(scale, of=["w"])
    ... def scale_rule(g, x, w):
    ...     return {"w": (g * x * w.exp()).flatten(1, -2).sum(1)}
    """

    check_op("implements_per_sample_grads", op)

    def register(function: R) -> R:
        name, names = op_name(op), [one for one in inspect.signature(function).parameters if one != "g"]
        arguments = names if of is None else list(of)
        for one in arguments:
            if one not in names:
                raise RuleError(
                    f"of= names '{one}', and the rule of {name} takes {', '.join(names)}",
                    advice=nearest(one, names, "Name arguments that the rule's function takes, besides g."),
                )
        rule(op, of=arguments, override=override)(function)
        if family_of(name) is None:
            register_op(op)
        return function

    return register


def register_op(op: Any, family: Family = Family.ALONE) -> None:
    """Declare that an op of your own treats samples alone.

    Args:
        op: the function or custom op. A plain Python function becomes one node of the graph.
        family: ``Family.ALONE`` is the general promise: row n of every output is computed from row n of every batched
            input and from nothing else, and the sample dimension stays where its size says. Another `Family`
            describes the exact behaviour, such as ``Family.ELEMENTWISE``.

    Raises:
        OptionError: the op is a name or a class, or the family is no `Family`.

    Guarantees:
        A promise that does not hold gives wrong gradients. `fxgrad.testing.check_rule` tries it on numbers, and
        `fxgrad.explain` lists the ops that you registered.

    >>> def halved(x):
    ...     return x / 2
    >>> register_op(halved)
    """
    check_op("register_op", op)
    if not isinstance(family, Family):
        names = [one.name for one in Family]
        known = nearest(family.upper(), names) if isinstance(family, str) else ""
        raise OptionError(
            f"family has to be a fxgrad.Family, not {family!r}", advice=known or "Pass one such as Family.ELEMENTWISE."
        )
    if isinstance(op, FunctionType):
        torch.compiler.allow_in_graph(op)
    register_family(op, family)


def check_op(name: str, op: Any) -> None:
    """Refuse what is no op, such as its name or a module's class, whose calls no graph has."""
    if isinstance(op, str | type) or not callable(op):
        raise OptionError(
            f"{name} takes a function or a custom op, not {op!r}",
            advice="Pass the object that the model calls, such as torch.ops.mylib.myop or your function.",
        )
