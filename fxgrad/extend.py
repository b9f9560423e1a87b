"""Teaching fxgrad an op of one's own: its rule, or that it treats samples alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import torch

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

    Args:
        op: the function or custom op. A plain Python function becomes one node of the graph.
        of: the arguments that the rule differentiates by; None for all that the function names besides ``g``.
        override: whether a rule that is registered already is replaced.

    Returns:
        A decorator, which returns the function unaltered.

    Raises:
        RuleError: the op has a rule and override is False.

    Guarantees:
        You promise that the op treats samples alone. `fxgrad.testing.check_rule` tries the rule on numbers.

    >>> def scale(x, w):
    ...     return x * w.exp()
    >>> @implements_per_sample_grads(scale, of=["w"])
    ... def scale_rule(g, x, w):
    ...     return {"w": (g * x * w.exp()).flatten(1, -2).sum(1)}
    """

    def register(function: R) -> R:
        import inspect

        name = op_name(op)
        arguments = of if of is not None else set(inspect.signature(function).parameters) - {"g"}
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

    Guarantees:
        A promise that does not hold gives wrong gradients. `fxgrad.testing.check_rule` tries it on numbers, and
        `fxgrad.explain` lists the ops that you registered.

    >>> def halved(x):
    ...     return x / 2
    >>> register_op(halved)
    """
    if isinstance(op, FunctionType):
        torch.compiler.allow_in_graph(op)
    register_family(op, family)
