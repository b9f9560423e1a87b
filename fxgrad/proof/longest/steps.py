"""`Steps`, one padded dimension of a value, and `Step`, the view of a call that the handlers of `longest` get."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from fxgrad.proof.calls import Call
from fxgrad.proof.trials import symbols_of

_ONE = sympy.Integer(1)
WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that represent lengths and positions exactly


class Seen(Exception):
    """Raised when an op may see the length of the longest sample."""


@dataclass(frozen=True)
class Steps:
    """One padded dimension: a dimension with the steps of the longest sample."""

    length: sympy.Expr  # the number of steps
    inner: sympy.Expr = _ONE  # elements of one step, after a merge with later dimensions
    number: float | None = None  # the padding, for any values of the parameters: 0, 1, ±inf
    sure: bool = True  # the padding is never nan, even if other values of the sample are not finite
    finite: bool = False  # the padding is finite if the other values of the sample are
    places: bool = False  # the elements are the positions 0, 1, 2, ..
    stays: bool = False  # the padding repeats a sample's last step

    @property
    def safe(self) -> bool:
        return self.finite or (self.number is not None and math.isfinite(self.number))

    def alike(self, other: Steps) -> bool:
        """Decide whether another dimension has the same steps."""
        return (self.length, self.inner) == (other.length, other.inner)

    def unknown(self, *, finite: bool = False) -> Steps:
        """Return the same steps with unknown padding."""
        return Steps(self.length, self.inner, finite=finite)


Padded = dict[int, Steps]  # by dimension


class Padding:
    """The symbols of sizes that depend on samples.

    Samples can influence each other through padding in two ways. An op may count the steps, or the padding may add to
    the result of a shorter sample. `longest` checks both.
    """

    def __init__(self) -> None:
        self.lengths: dict[Any, int | None] = {}  # lengths of a longest sample -> its packed sequence
        self.rows: set[Any] = set()  # row counts of packed data

    def enter(self, length: Any, pack: int | None) -> None:
        """Register a symbol as the length of the longest sample of a packed sequence."""
        self.rows.discard(length)
        self.lengths[length] = pack

    def __bool__(self) -> bool:
        return bool(self.lengths or self.rows)

    def __contains__(self, symbol: Any) -> bool:
        return symbol in self.lengths or symbol in self.rows

    def along(self, size: Any) -> bool:
        """Decide whether a size contains the length of a longest sample."""
        return not self.lengths.keys().isdisjoint(symbols_of(size))

    def lone(self, size: Any) -> bool:
        """Decide whether a size is exactly the length of a longest sample."""
        return isinstance(size, torch.SymInt) and size.node.expr in self.lengths

    def pack(self, length: Any) -> int | None:
        return self.lengths.get(length)

    def of_rows(self, tensor: Tensor) -> bool:
        """Decide whether a value's size contains the row count of packed data."""
        return any(not self.rows.isdisjoint(symbols_of(size)) for size in tensor.shape)


class Step:
    """A call, with the padded dimensions of its tensors."""

    def __init__(self, call: Call, lengths: Padding) -> None:
        self.call, self.lengths = call, lengths
        self.name = call.name

    def of(self, tensor: Tensor) -> Padded:
        """Return the padded dimensions of a value; raise `Seen` unless all of them are known."""
        padded = dict(self.call.facts.of(tensor).padded)
        if padded.keys() != set(self.dims(tensor)):
            raise Seen
        return padded

    def dims(self, tensor: Any) -> list[int]:
        return [dim for dim, size in enumerate(tensor.shape) if self.lengths.along(size)]

    def source(self) -> Tensor:
        for name in ("self", "input"):
            if self.call.has(name):
                return self.call.arguments[name]  # type: ignore[no-any-return]
        return self.call.tensors[0][1]

    def front(self, tensor: Tensor, dim: int) -> bool:
        """Decide whether an index along a dimension names the same step for every number of steps."""
        steps = self.of(tensor)[dim]
        return bool(sympy.expand(expr(tensor.shape[dim]) - steps.length * steps.inner) == 0)

    def only(self, *names: str) -> None:
        """Raise `Seen` if any other operand has padded dimensions."""
        for name, tensor in self.call.tensors:
            if name not in names and self.dims(tensor):
                raise Seen

    def new(self, size: Any, **known: Any) -> Steps:
        """Make the steps of a new dimension of this size."""
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
    """Decide whether a tensor has one element for all samples."""
    return all(map(is_one, tensor.shape))


def is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def filled(steps: Steps, number: float | None, *, sure: bool = True) -> Steps:
    """Return the steps with one number as padding."""
    return replace(steps.unknown(finite=number is not None and math.isfinite(number)), number=number, sure=sure)


def held(steps: Steps, dtype: torch.dtype) -> Steps:
    """Return the steps for a value of this dtype; only padding that the dtype represents exactly stays known."""
    known = steps.number in (0.0, 1.0) or (steps.number is not None and math.isinf(steps.number))
    whole = not dtype.is_floating_point and not dtype.is_complex
    if known and not (whole and math.isinf(steps.number or 0.0)):
        return steps
    return replace(steps, number=None, sure=True)


def expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
