"""The two batch sizes at which a replay determines the layout for all batch sizes.

A movement op with sizes, shifts and indices linear in B maps positions by ``a i + b B + c``. If it keeps each sample in
place at B = 2 and B = 3, then a = 1 and b = c = 0. So it does at every B. Ops with thresholds differ:
``x.roll(6, 0)`` and ``x[arange(B) % 4]`` have no effect at three samples. So the replay takes two sizes above every
threshold: the batch size from which an index made of sizes behaves uniformly. For a threshold above `LARGEST`, fxgrad
gives up: the samples count as lost.

Each value of an index's computation is bounded by ``constant + slope * n``, where n is the batch size or a position
along it. A nonlinear op (a comparison, a quotient, the overflow of a dtype) behaves uniformly above the batch size at
which the bounds of its operands cross. An op without a rule here has no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.ops.calls import CALL, Call, leaves, op_name
from fxgrad.ops.facts import FAKE
from fxgrad.ops.values import upstream
from fxgrad.samples.layouts import Kind, kind_of, layout_of
from fxgrad.samples.symbols import Symbols, expression

Batches = tuple[int, int]
BATCHES: Batches = (2, 3)
LARGEST = 64

_INDEXED = frozenset("getitem index_select index index_put index_add index_copy scatter_add embedding_bag".split())
_ROOM = 2**20  # more rows than any batch has; an overflow beyond is ignored


@dataclass(frozen=True)
class Bounds:
    """``|value| <= constant + slope * n``; from ``threshold`` samples on, the ops before behave uniformly."""

    constant: float = 0.0
    slope: float = 0.0
    threshold: float = 0.0


def batches_above(threshold: float) -> Batches | None:
    """Return two batch sizes above a threshold; None if it is above `LARGEST`."""
    if threshold > LARGEST:
        return None
    above = math.ceil(threshold) + 1
    return BATCHES if threshold < BATCHES[0] else (above, above + 1)


class _Unknown(Exception):
    """Raised for an op or a number with unknown behaviour at large batch sizes."""


class Thresholds:
    """The thresholds of a graph's movement ops; ``constant(node, batch)`` computes a value made only of sizes."""

    def __init__(self, symbols: Symbols, constant: Callable[[fx.Node, int], Tensor]) -> None:
        self.symbols, self.constant = symbols, constant
        self.bounds: dict[fx.Node, Bounds] = {}

    def batches(self, node: fx.Node) -> Batches | None:
        """Return the two batch sizes for an op; None if no two of them determine all others."""
        if not all(map(self.symbols.is_linear, numbers([node.args, dict(node.kwargs)]))):
            return None
        largest: float = max([0, *self._shifts(node), *map(self._of_index, self._indices(node))])
        return batches_above(largest)

    def _shifts(self, node: fx.Node) -> Iterator[int]:
        """Yield the shifts, independent of B, by which a roll moves samples."""
        if op_name(node.target) != "roll":
            return
        call = CALL.of(node)
        source = call.arguments["input"]
        ndim, layout = max(1, FAKE.of(source).dim()), layout_of(source)
        dims = _as_list(call.get("dims"))
        for i, shift in enumerate(_as_list(call.get("shifts"))):
            if not dims or layout is None or dims[i] % ndim == layout.dim:
                for number in numbers(shift):
                    if self.symbols.symbol not in expression(number).free_symbols:
                        yield abs(int(self.symbols.evaluate(number, BATCHES[0])))

    def _indices(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the indices of an op that depend on the batch size."""
        if op_name(node.target).removesuffix("_") in _INDEXED:
            indices = leaves((node.args[1:], dict(node.kwargs)))
            yield from (index for index in indices if isinstance(index, fx.Node) and self._depends(index))

    def _of_index(self, index: fx.Node) -> float:
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
        if not self.symbols.is_linear(number):
            raise _Unknown
        two, three = (int(self.symbols.evaluate(number, batch)) for batch in (2, 3))
        return Bounds(abs(3 * two - 2 * three), abs(three - two))

    def _of_node(self, node: fx.Node) -> Bounds:
        if node not in self.bounds:
            self.bounds[node] = self._computed(node)
        return self.bounds[node]

    def _computed(self, node: fx.Node) -> Bounds:
        fake = FAKE.of(node)
        if isinstance(fake, int | float | torch.SymInt | torch.SymFloat):
            return self._of_number(fake)
        if node.op not in ("call_function", "call_method") or kind_of(node) not in (None, Kind.CONSTANT):
            return Bounds()  # the replay has zeros in its place, which stand for no sample
        if isinstance(fake, Tensor) and not self._depends(node):
            value = self.constant(node, 2)
            return Bounds(float(value.abs().max()) if value.numel() and not value.is_complex() else 0.0)
        call: Call | None = CALL.get(node)
        rule = None if call is None else _RULES.get(call.op)
        if call is None or rule is None:
            raise _Unknown
        truth = isinstance(fake, Tensor) and fake.dtype == torch.bool and rule is _same
        return _in_range((_truth if truth else rule)(self._of, call.arguments), fake)

    def _depends(self, node: fx.Node) -> bool:
        """Decide whether a value, or a value that it is made from, depends on the batch size."""
        return any(
            self.symbols.holds_batch(number)
            for source in upstream(node)
            for number in numbers([_sizes(FAKE.of(source)), source.args, dict(source.kwargs)])
        )


def numbers(value: Any) -> Iterator[Any]:
    """Yield the integers in nested arguments, including those of nodes."""
    for leaf in leaves(value):
        if isinstance(leaf, fx.Node):
            yield from numbers(FAKE.of(leaf))
        elif isinstance(leaf, int | torch.SymInt) and not isinstance(leaf, bool):
            yield leaf


def _sizes(fake: Any) -> Any:
    return list(fake.shape) if isinstance(fake, Tensor) else fake


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, tuple | list) else [value]


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
    return list(map(of, leaves(arguments)))


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
    a, indices = of(arguments["input"]), [of(one) for one in leaves(arguments.get("index", arguments.get("indices")))]
    sizes = [of(size).constant for size in fake.shape] if isinstance(fake, Tensor) else []
    moved, steps = sum(one.constant for one in indices), max([1.0, *(one.slope for one in indices)])
    at = _crossing([a, *indices, Bounds(sum(sizes), 1.0)]) if indices else 0.0
    return _met(a, *indices, at=at, constant=a.constant + a.slope * moved, slope=a.slope * steps)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys("zeros zeros_like new_zeros".split(), lambda of, arguments: Bounds(0.0)),
    **dict.fromkeys("ones ones_like new_ones".split(), lambda of, arguments: Bounds(1.0)),
    **dict.fromkeys("full new_full full_like".split(), lambda of, arguments: of(arguments["fill_value"])),
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
    "cumsum": _running,
    **dict.fromkeys("argsort sort topk".split(), _order),
    **dict.fromkeys("getitem index".split(), _read),
}
