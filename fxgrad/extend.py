"""Teaching fxgrad an op of one's own: its rule, or that it treats samples alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import torch

from fxgrad.calls import op_name
from fxgrad.rules.registry import rule
from fxgrad.samples.families import Family, family_of, register_family

R = TypeVar("R", bound=Callable[..., Mapping[str, Any]])


def implements_per_sample_grads(
    op: Any, *, of: Iterable[str] | None = None, override: bool = False
) -> Callable[[R], R]:
    """Register a per-sample-gradient rule for an op of your own (a function or a custom op).

    The decorated function gets ``g``, the gradient of the op's output, and the op's arguments by name.
    ``g`` and every argument that holds samples have the samples first: row n is what the op sees when it
    is called on sample n alone (with the sample dimension kept, of size 1). It returns a dict from
    argument name to the parameter's gradient: a tensor ``[n, *shape]`` or a `fxgrad.Term`.

    With it you say that the op treats samples alone. A plain Python function becomes one node of the
    graph. ``of`` names the arguments the rule can differentiate by (those it returns; all by default).
    Replacing a rule needs ``override=True``.

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
    """Say that an op nobody classified treats samples alone.

    ``Family.ALONE`` is the general promise: row n of every output is computed from row n of every batched
    input and from nothing else, and the sample dimension stays where its size says. Another `Family`
    gives the exact behaviour, such as ``Family.ELEMENTWISE``.

    A promise that does not hold gives wrong gradients: `fxgrad.testing.check_rule` tries it on numbers.
    """
    if isinstance(op, FunctionType):
        torch.compiler.allow_in_graph(op)
    register_family(op, family)
