"""One dimension with the steps of the longest sample, and a call as what follows such dimensions sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor

from fxgrad.independence.calls import Call

_ONE = sympy.Integer(1)
WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that hold lengths and places as they are


class Seen(Exception):
    """An op may see how long the longest sample is."""


@dataclass(frozen=True)
class Steps:
    """One dimension of a value that has the steps of the longest sample."""

    length: sympy.Expr  # how many there are
    inner: sympy.Expr = _ONE  # elements of one step, where it was merged with dimensions behind it
    number: float | None = None  # what stands behind the end of every sample, whatever the parameters are: 0, 1, ±inf
    sure: bool = True  # it is not nan instead where other values of the sample are not finite
    finite: bool = False  # neither infinite nor nan stands there, where other values of the sample are finite
    places: bool = False  # the elements are 0, 1, 2, ..
    stays: bool = False  # a sample's last step is repeated behind its end

    @property
    def safe(self) -> bool:
        return self.finite or (self.number is not None and math.isfinite(self.number))

    def unknown(self, *, finite: bool = False) -> Steps:
        """The same steps with other values in them."""
        return Steps(self.length, self.inner, finite=finite)


Padded = dict[int, Steps]  # by dimension


class Lengths(Protocol):
    """Which sizes are lengths of longest samples."""

    def along(self, size: Any) -> bool: ...

    def lone(self, size: Any) -> bool: ...

    def pack(self, length: sympy.Expr) -> int | None: ...


class Step:
    """A call, and which dimensions of its tensors have the steps of longest samples."""

    def __init__(self, call: Call, lengths: Lengths) -> None:
        self.call, self.lengths = call, lengths
        self.name = call.name

    def of(self, tensor: Tensor) -> Padded:
        """The steps of a value; all of them have to be known."""
        found = dict(self.call.origins(tensor).padded)
        if found.keys() != set(self.dims(tensor)):
            raise Seen
        return found

    def dims(self, tensor: Any) -> list[int]:
        return [dim for dim, size in enumerate(tensor.shape) if self.lengths.along(size)]

    def source(self) -> Tensor:
        for name in ("self", "input"):
            if self.call.has(name):
                return self.call.arguments[name]  # type: ignore[no-any-return]
        return self.call.tensors()[0][1]

    def front(self, tensor: Tensor, dim: int) -> bool:
        """Whether an index along a dimension means the same step however many there are."""
        own = self.of(tensor)[dim]
        return bool(sympy.expand(expr(tensor.shape[dim]) - own.length * own.inner) == 0)

    def only(self, *names: str) -> None:
        """No other operand may have steps."""
        for name, tensor in self.call.tensors():
            if name not in names and self.dims(tensor):
                raise Seen

    def new(self, size: Any, **known: Any) -> Steps:
        """Steps that a size makes."""
        if not self.lengths.lone(size):
            raise Seen
        return Steps(size.node.expr, **known)


Handler = Callable[[Step], list[Padded]]
HANDLERS: dict[str, Handler] = {}


def steps_of(names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register


def single(tensor: Tensor) -> bool:
    """Whether a tensor has one element, whatever samples say."""
    return all(map(is_one, tensor.shape))


def is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def filled(steps: Steps, number: float | None, *, sure: bool = True) -> Steps:
    """Steps behind the end of which one number stands."""
    return replace(steps.unknown(finite=number is not None and math.isfinite(number)), number=number, sure=sure)


def held(steps: Steps, dtype: torch.dtype) -> Steps:
    """Steps of a value of this dtype: of numbers, those that every dtype has exactly."""
    known = steps.number in (0.0, 1.0) or (steps.number is not None and math.isinf(steps.number))
    whole = not dtype.is_floating_point and not dtype.is_complex
    if known and not (whole and math.isinf(steps.number or 0.0)):
        return steps
    return replace(steps, number=None, sure=True)


def expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
