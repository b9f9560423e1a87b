"""The table of rules: one op, one rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from fxgrad.errors import RuleError
from fxgrad.ops.calls import Call, op_name
from fxgrad.ops.families import CHANGES
from fxgrad.rules.uses import Use
from fxgrad.terms import Term

RuleFunction = Callable[..., Mapping[str, Any]]
Applies = Callable[[Use, Sequence[Any]], bool]  # of a use, and the operands' shapes, None for numbers
F = TypeVar("F", bound=Callable[..., Any])


def always(use: Use, shapes: Sequence[Any]) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """A per-sample-gradient rule of one op.

    ``differentiates`` are the arguments it can give gradients for, ``batched`` those that must hold the
    samples for it to apply; with ``shared`` it also applies where no argument does, and ``applies`` is what else has
    to be true. It ``permutes`` the elements of its one parameter where it moves each of them to one place, and
    ``slices`` where its value is a piece of its parameter or made of its parameters as pieces.
    """

    function: RuleFunction
    arguments: tuple[str, ...]
    differentiates: frozenset[str]
    batched: frozenset[str]
    shared: bool
    refuse: Mapping[str, str]
    ignore: Mapping[str, str]
    permutes: bool
    slices: bool
    applies: Applies

    @property
    def own(self) -> bool:
        """Return whether the rule is fxgrad's own and not a user's."""
        return self.function.__module__.startswith("fxgrad.rules.")

    def unhandled(self, call: Call) -> list[str]:
        """Given arguments the rule neither takes nor ignores."""
        known = {*self.arguments, *self.refuse, *self.ignore, "out", "dtype"}
        return [name for name in call.given if name not in known]

    def takes(self, use: Use, call: Call, shapes: Sequence[Any]) -> bool:
        """Return whether the rule applies to a use."""
        if not use.differentiated.keys() <= self.differentiates or self.unhandled(call):
            return False
        fits = self.shared if use.output is None else all(map(use.has_samples, self.batched))
        return fits and self.applies(use, shapes)

    def check_returned(self, op: str, returned: Any, g: Tensor, parameters: Mapping[str, Any]) -> None:
        """Raise where a user's rule did not return ``{argument: gradient [n, *shape]}`` for these parameters."""
        advice = "Return a dict from each argument's name to its gradient, a tensor [n, *shape] or a Term."
        if not isinstance(returned, Mapping):
            raise RuleError(f"the rule of {op} returned {type(returned).__name__}, not a dict", advice=advice)
        for name, parameter in parameters.items():
            if name not in returned:
                got = ", ".join(map(repr, returned)) or "nothing"
                raise RuleError(f"the rule of {op} returned {got}, and no gradient of '{name}'", advice=advice)
            if isinstance(parameter, Tensor):
                _check_shape(op, name, returned[name], g.shape[0], parameter)

    def refused(self, call: Call) -> tuple[str, str] | None:
        """Return an argument the rule says it cannot take, with the reason."""
        for name in call.given & self.refuse.keys():
            if call.arguments[name] not in (None, False):
                return name, self.refuse[name]
        return None


def _check_shape(op: str, name: str, grad: Any, samples: Any, parameter: Tensor) -> None:
    """Raise where the gradient that a user's rule returned has not the size of one parameter per sample."""
    if isinstance(grad, Term):
        shape = [samples, *(grad.result_shape() if grad.shape is None else grad.shape)]
    elif isinstance(grad, Tensor):
        shape = list(grad.shape)
    else:
        return
    if shape[:1] != [samples] or _without_ones(shape[1:]) != _without_ones(parameter.shape):
        raise RuleError(
            f"the rule of {op} returned a gradient of '{name}' of shape {shape}: it has to be "
            f"{[samples, *parameter.shape]}",
            advice="Sum over what is no sample, and keep the samples on dimension 0.",
        )


def _without_ones(shape: Iterable[Any]) -> list[Any]:
    return [size for size in shape if size != 1]


RULES: dict[str, Rule] = {}


def rule(
    *ops: Any,
    of: Iterable[str],
    batched: Iterable[str] = (),
    shared: bool = False,
    refuse: Mapping[str, str] | None = None,
    ignore: Mapping[str, str] | None = None,
    override: bool = False,
    permutes: bool = False,
    slices: bool = False,
    applies: Applies | None = None,
) -> Callable[[F], F]:
    """Register ``function(g, **arguments) -> {argument: Term or Tensor}`` for an op's canonical name.

    The function sees the samples first in ``g`` and in every batched argument, and gets the arguments
    its signature names; ``use`` gives it the whole call. A rule in another's place applies where that did.
    """

    def register(function: F) -> F:
        names = tuple(name for name in inspect.signature(function).parameters if name != "g")
        CHANGES.extend(map(str, ops))
        for op in ops:
            name = op if isinstance(op, str) else op_name(op)
            if name in RULES and not override:
                raise RuleError(f"{name} already has a rule", advice="Pass override=True to replace it on purpose.")
            where = applies or (RULES[name].applies if name in RULES else always)
            RULES[name] = Rule(
                function, names, frozenset(of), frozenset(batched), shared, refuse or {}, ignore or {},
                permutes, slices, where,
            )  # fmt: skip
        return function

    return register


@dataclass(frozen=True)
class OwnBackward:
    """An op with a backward of fxgrad's own, which yields its parameters' gradients beside its inputs'.

    ``of`` are the arguments that may be parameters, ``rows`` the one whose layout the gradients have, and the
    first ``outputs`` of its outputs carry gradients.
    """

    function: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]]
    arguments: tuple[str, ...]
    of: frozenset[str]
    rows: str
    outputs: int


OWN_BACKWARDS: dict[str, OwnBackward] = {}


def own_backward(op: str, *, of: Iterable[str], rows: str, outputs: int) -> Callable[[F], F]:
    """Register ``function(grads, outputs, samples_first, **arguments) -> (input gradients, parameters' terms)``.

    It stands in for autograd's backward of the op, whose rule would have to compute the same again.
    ``samples_first`` brings a value with the layout of the argument ``rows`` into a term's form. An input's gradient is
    a function without arguments, called if the input requires one.
    """

    def register(function: F) -> F:
        names = tuple(inspect.signature(function).parameters)[3:]
        OWN_BACKWARDS[op] = OwnBackward(function, names, frozenset(of), rows, outputs)
        return function

    return register
