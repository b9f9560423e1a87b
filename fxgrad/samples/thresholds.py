"""Thresholds: the batch size from which an index made of sizes behaves uniformly.

Each value of the computation is bounded by ``constant + slope * n``, where n is the batch size or a position along it.
A nonlinear op (a comparison, a quotient, the overflow of a dtype) behaves uniformly above the batch size at which the
bounds of its operands cross. An op without a rule here has no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.facts import FAKE
from fxgrad.samples.layouts import Kind, Samples
from fxgrad.samples.symbols import Symbols, expression

_ROOM = 2**20  # more rows than any batch has; an overflow beyond is ignored


@dataclass(frozen=True)
class Bounds:
    """``|value| <= constant + slope * n``; from ``threshold`` samples on, the ops before behave uniformly."""

    constant: float = 0.0
    slope: float = 0.0
    threshold: float = 0.0


class _Unknown(Exception):
    """Raised for an op or a number with unknown behaviour at large batch sizes."""


class Thresholds:
    """The thresholds of a graph's indices; ``constant(node, batch)`` computes a value made only of sizes."""

    def __init__(
        self, symbols: Symbols, samples: Callable[[fx.Node], Any], constant: Callable[[fx.Node, int], Tensor]
    ) -> None:
        self.symbols, self.samples, self.constant = symbols, samples, constant
        self.bounds: dict[fx.Node, Bounds] = {}

    def of(self, index: fx.Node) -> float:
        """Return the batch size from which an index behaves uniformly; infinity if unknown."""
        try:
            return self._of_node(index).threshold
        except _Unknown:
            return math.inf

    def _of(self, value: Any) -> Bounds:
        if isinstance(value, fx.Node):
            return self._of_node(value)
        if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
            return self._of_number(value)
        return Bounds()

    def _of_number(self, number: Any) -> Bounds:
        if isinstance(number, float):
            return Bounds(abs(number))
        expr, batch = expression(number), self.symbols.symbol
        if batch not in expr.free_symbols:
            return Bounds(abs(int(self.symbols.evaluate(number, 2))))
        polynomial = expr.as_poly(batch)
        if polynomial is None or polynomial.degree() != 1 or expr.atoms(sympy.Function):
            raise _Unknown
        two, three = (int(self.symbols.evaluate(number, n)) for n in (2, 3))
        return Bounds(abs(3 * two - 2 * three), abs(three - two))

    def _of_node(self, node: fx.Node) -> Bounds:
        if node not in self.bounds:
            self.bounds[node] = self._computed(node)
        return self.bounds[node]

    def _computed(self, node: fx.Node) -> Bounds:
        fake = FAKE.of(node)
        if isinstance(fake, int | float | torch.SymInt | torch.SymFloat):
            return self._of_number(fake)
        known = self.samples(node)
        data = node.op not in ("call_function", "call_method")
        if data or (isinstance(known, Samples) and known.kind is not Kind.CONSTANT):
            return Bounds()  # the replay has zeros in its place, which stand for no sample
        if isinstance(fake, Tensor) and not self.depends(node):
            value = self.constant(node, 2)
            return Bounds(float(value.abs().max()) if value.numel() and not value.is_complex() else 0.0)
        call: Call | None = CALL.get(node)
        rule = None if call is None else _RULES.get(call.op)
        if call is None or rule is None:
            raise _Unknown
        truth = isinstance(fake, Tensor) and fake.dtype == torch.bool and rule is _same
        return _in_range((_truth if truth else rule)(self._of, call.arguments), fake)

    def depends(self, node: fx.Node) -> bool:
        """Decide whether a value, or a value that it is made from, depends on the batch size."""
        stack, seen = [node], {node}
        while stack:
            current = stack.pop()
            fake = FAKE.of(current)
            sizes = list(fake.shape) if isinstance(fake, Tensor) else fake
            if any(map(self.symbols.holds_batch, numbers([sizes, current.args, dict(current.kwargs)]))):
                return True
            fresh = [arg for arg in current.all_input_nodes if arg not in seen]
            seen.update(fresh)
            stack.extend(fresh)
        return False


def numbers(value: Any) -> Iterator[Any]:
    """Yield the integers in nested arguments, including those of nodes."""
    if isinstance(value, fx.Node):
        yield from numbers(FAKE.of(value))
    elif isinstance(value, dict):
        yield from numbers(list(value.values()))
    elif isinstance(value, slice):
        yield from numbers([value.start, value.stop, value.step])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        yield value


def _in_range(bounds: Bounds, fake: Any) -> Bounds:
    """Add the threshold at which a value overflows its dtype, such as 128 samples for int8."""
    dtype = fake.dtype if isinstance(fake, Tensor) else torch.int64
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not bounds.slope:
        return bounds
    end = (torch.iinfo(dtype).max - bounds.constant) / bounds.slope
    return bounds if end > _ROOM else _met(bounds, at=max(end, 0.0))


def _met(*operands: Bounds, at: float = 0.0, constant: float | None = None, slope: float | None = None) -> Bounds:
    """Return the largest of several bounds, with a threshold of at least ``at``."""
    return Bounds(
        max((one.constant for one in operands), default=0.0) if constant is None else constant,
        max((one.slope for one in operands), default=0.0) if slope is None else slope,
        max([at, *(one.threshold for one in operands)]),
    )


_Of = Callable[[Any], Bounds]
_Arguments = Any
_Rule = Callable[[_Of, _Arguments], Bounds]


def _all(of: _Of, arguments: _Arguments) -> list[Bounds]:
    bounds: list[Bounds] = []
    for value in arguments.values():
        bounds.extend(map(of, value) if isinstance(value, list | tuple) else [of(value)])
    return bounds


def _crossing(operands: Sequence[Bounds]) -> float:
    """Return the batch size above which no two bounds cross."""
    slopes = [one.slope for one in operands if one.slope]
    return math.ceil(sum(one.constant for one in operands) / min([1.0, *slopes])) if slopes else 0.0


def _same(of: _Of, arguments: _Arguments) -> Bounds:
    """Bound an op that keeps the values of its input."""
    return of(arguments.get("input"))


def _compared(of: _Of, arguments: _Arguments) -> Bounds:
    """Bound an op that selects one of several values by comparison."""
    operands = _all(of, arguments)
    return _met(*operands, at=_crossing(operands))


def _truth(of: _Of, arguments: _Arguments) -> Bounds:
    operands = _all(of, arguments)
    return _met(*operands, at=_crossing(operands), constant=1.0, slope=0.0)


def _sum(of: _Of, arguments: _Arguments) -> Bounds:
    a, b = of(arguments["input"]), of(arguments["other"])
    scale = of(arguments.get("alpha", 1)).constant
    return _met(a, b, constant=a.constant + scale * b.constant, slope=a.slope + scale * b.slope)


def _product(of: _Of, arguments: _Arguments) -> Bounds:
    a, b = of(arguments["input"]), of(arguments["other"])
    if a.slope and b.slope:
        raise _Unknown
    return _met(a, b, constant=a.constant * b.constant, slope=a.constant * b.slope + b.constant * a.slope)


def _quotient(of: _Of, arguments: _Arguments) -> Bounds:
    a, b = of(arguments["input"]), of(arguments["other"])
    if b.slope or not b.constant or arguments.get("rounding_mode", "floor") != "floor":
        raise _Unknown
    at = math.ceil((a.constant + b.constant) / min(1.0, a.slope or 1.0))
    return _met(a, b, at=at, constant=a.constant / b.constant + 1, slope=a.slope / b.constant)


def _rest(of: _Of, arguments: _Arguments) -> Bounds:
    a, b = of(arguments["input"]), of(arguments["other"])
    at = math.ceil((a.constant + b.constant) / min(1.0, a.slope or 1.0))
    return _met(a, b, at=at, constant=b.constant, slope=b.slope)


def _line(of: _Of, arguments: _Arguments) -> Bounds:
    """Bound ``arange``, which adds a step at each position."""
    start, step = of(arguments.get("start", 0)), of(arguments.get("step", 1))
    if step.slope:
        raise _Unknown
    return _met(start, step, constant=start.constant, slope=start.slope + step.constant)


def _filled(of: _Of, arguments: _Arguments) -> Bounds:
    return of(arguments["fill_value"])


def _running(of: _Of, arguments: _Arguments) -> Bounds:
    """Bound a cumulative sum of bounded values."""
    a, sizes = of(arguments["input"]), [of(size) for size in FAKE.of(arguments["input"]).shape]
    if a.slope:
        raise _Unknown
    longest = math.prod(max(1.0, size.constant + size.slope) for size in sizes)
    return _met(a, constant=a.constant * longest, slope=a.constant * longest)


def _repeated(of: _Of, arguments: _Arguments) -> Bounds:
    """Bound a repeat by a number; refuse one by a tensor, whose cumulative sums would be the positions."""
    if isinstance(arguments.get("repeats"), fx.Node) and isinstance(FAKE.of(arguments["repeats"]), Tensor):
        raise _Unknown
    return _same(of, arguments)


def _order(of: _Of, arguments: _Arguments) -> Bounds:
    """Bound the positions that a sort returns."""
    a = of(arguments["input"])
    return _met(a, at=_crossing([a]), constant=a.constant, slope=max(1.0, a.slope))


def _read(of: _Of, arguments: _Arguments) -> Bounds:
    """Bound ``values[index]``, for an index of numbers, slices or other bounded indices."""
    fake = FAKE.of(arguments["input"])
    a, indices = of(arguments["input"]), [of(one) for one in _flat(arguments.get("index", arguments.get("indices")))]
    sizes = [of(size).constant for size in fake.shape] if isinstance(fake, Tensor) else []
    moved, steps = sum(one.constant for one in indices), max([1.0, *(one.slope for one in indices)])
    at = _crossing([a, *indices, Bounds(sum(sizes), 1.0)]) if indices else 0.0
    return _met(a, *indices, at=at, constant=a.constant + a.slope * moved, slope=a.slope * steps)


def _flat(index: Any) -> list[Any]:
    if isinstance(index, tuple | list):
        return [one for item in index for one in _flat(item)]
    return _flat([index.start, index.stop, index.step]) if isinstance(index, slice) else [index]


def _constant(value: float) -> _Rule:
    return lambda of, arguments: Bounds(value)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys("zeros zeros_like new_zeros".split(), _constant(0.0)),
    **dict.fromkeys("ones ones_like new_ones".split(), _constant(1.0)),
    **dict.fromkeys("full new_full full_like".split(), _filled),
    "arange": _line,
    **dict.fromkeys(
        """neg long int to clone view reshape unsqueeze squeeze expand expand_as view_as reshape_as flatten unflatten t
        transpose permute contiguous detach""".split(),
        _same,
    ),
    **dict.fromkeys("repeat repeat_interleave".split(), _repeated),
    **dict.fromkeys("add sub rsub".split(), _sum),
    "mul": _product,
    **dict.fromkeys("floor_divide div".split(), _quotient),
    "remainder": _rest,
    **dict.fromkeys("clamp clamp_min clamp_max minimum maximum max min amax amin where abs".split(), _compared),
    **dict.fromkeys("lt le gt ge eq ne logical_and logical_or logical_not bool".split(), _truth),
    **dict.fromkeys(["cumsum"], _running),
    **dict.fromkeys("argsort sort topk".split(), _order),
    **dict.fromkeys("getitem index".split(), _read),
}
