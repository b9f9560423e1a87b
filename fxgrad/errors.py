"""Every error fxgrad raises: one class each, and one shape for all of them.

An error has four parts: what went wrong with which op and parameter, the user's source line, the path
the samples took to get there, and what to do about it.

    MixedSamples: batch_norm in training mode lets samples influence each other
      model.py:41   x = self.bn(x)
      path: x -> conv2d -> batch_norm
      Use GroupNorm, or put the layer in eval mode, or pass mixing="allow".

Advice names an option only where the model's other options go with it (`Options.takes`).
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class FxgradError(RuntimeError):
    """The base class of fxgrad's errors; its text has up to four parts.

    Attributes:
        sentence: what went wrong, with which op and parameter.
        where: the user's source line, such as ``model.py:41   x = self.bn(x)``; may be empty.
        path: the ops on the way of the samples, such as ``x -> conv2d -> batch_norm``; may be empty.
        advice: what to do; may be empty.

    >>> raise FxgradError("the op is unknown", advice="Register it.")
    Traceback (most recent call last):
        ...
    fxgrad.errors.FxgradError: the op is unknown
      Register it.
    """

    def __init__(self, sentence: str, *, where: str = "", path: str = "", advice: str = "") -> None:
        self.sentence, self.where, self.path, self.advice = sentence, where, path, advice
        further = [where, f"path: {path}" if path else "", advice]
        super().__init__("\n".join([sentence, *(f"  {part}" for part in further if part)]))


class MixedSamples(FxgradError):
    """An op lets one sample's value reach another sample's."""


class UnknownOp(FxgradError):
    """An op without a known family: fxgrad cannot tell whether it treats samples alone."""


class UnsupportedOp(FxgradError):
    """A known op, used in a way that has no per-sample gradient here."""


class LostLayout(FxgradError):
    """The place of the samples inside a value could not be followed."""


class BatchSizeError(FxgradError):
    """The batch size is missing, ambiguous, or fixed by the model."""


class GraphBreak(FxgradError):
    """TorchDynamo could not capture the model as one graph."""


class TooManyGraphs(FxgradError):
    """Calls differ in what a graph is made for, so often that TorchDynamo compiles no more."""


class OutsideGraph(FxgradError):
    """A trainable parameter was used where no transformed graph saw it."""


class UncoveredParameter(FxgradError):
    """The coverage proof failed: a path from a parameter does not end in a tap."""


class UniformOutput(FxgradError):
    """A gradient arrived at an output that depends on parameters alone."""


class AlreadySet(FxgradError):
    """A result is still set from an earlier backward, or would be added to one it does not add to."""


class UnclippedGrad(FxgradError):
    """A gradient that is not clipped arrived at a parameter, while a quantity clips."""


class UnaccountedGrad(FxgradError):
    """A private step would move parameters by something else than what was clipped, delivered and noised."""


class NotEnoughMemory(FxgradError):
    """What a batch leaves behind is more than fits into memory."""


class NonFinite(FxgradError):
    """A sample's gradient holds Inf or NaN, where that is asked to be an error."""


class RefusedElsewhere(FxgradError):
    """A collective failed, and another process of the group has refused a step of the same model."""


class SpecViolation(FxgradError):
    """A pass broke an invariant of the pipeline: a bug in fxgrad, please report it."""


class RuleError(FxgradError):
    """A per-sample-gradient rule is missing, declared twice, or wrong."""


class OptionError(FxgradError):
    """An option of the public interface has a value it cannot take."""


class UnknownArgument(FxgradError, TypeError):
    """A keyword argument is misspelt, or is none of the function's."""


class MissingPackage(FxgradError, ImportError):  # type: ignore[misc]  # both have a path
    """A part of fxgrad needs a package that is not installed."""


def nearest(name: Any, known: Iterable[str], otherwise: str = "") -> str:
    """Return advice on a misspelt name: the known name that is nearest to it, or ``otherwise``.

    >>> nearest("inductr", ["inductor", "eager"])
    "Did you mean 'inductor'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7) if isinstance(name, str) else []
    return f"Did you mean '{close[0]}'?" if close else otherwise


def check_names(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first argument's name that a function does not know."""
    names = list(known)
    for one in given:
        if one not in names:
            raise UnknownArgument(
                f"{name} got an unexpected argument '{one}'",
                advice=nearest(one, names, f"It takes {', '.join(names)}."),
            )


def refuse_choice(name: str, value: Any, choices: Iterable[str], further: str = "", otherwise: str = "") -> NoReturn:
    """Raise for a value that an option cannot have: it takes one of the names, or what ``further`` says."""
    names = list(choices)
    *before, last = [*map(repr, names), *([further] if further else [])]
    raise OptionError(
        f"{name} has to be {', '.join(before)} or {last}, not {value!r}", advice=nearest(value, names, otherwise)
    )


def names_checked(of: F) -> F:
    """Let a function, or a class's constructor, raise `UnknownArgument` for a keyword that it does not have."""
    function: Any = vars(of)["__init__"] if isinstance(of, type) else of
    name = of.__name__
    known = [one for one in inspect.signature(function).parameters if one != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= set(known):
            check_names(name, kwargs, known)
        return function(*args, **kwargs)

    if not isinstance(of, type):
        return checked  # type: ignore[return-value]  # of the same signature
    setattr(of, "__init__", checked)  # noqa: B010 - mypy takes it for an instance's
    return of
