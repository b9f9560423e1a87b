"""At which two batch sizes a replay speaks for all of them.

A movement op whose sizes, shifts and indices are linear in B does at every B what it does at two and at three: a map
of positions ``a i + b B + c`` that leaves every sample in its place at both has a = 1 and b = c = 0. Thresholds are
something else: ``x.roll(6, 0)`` and ``x[arange(B) % 4]`` do nothing at three samples. So the replay takes sizes above
every number that may be a threshold; above `LARGEST` of them nobody decides, and the samples count as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.calls import op_name
from fxgrad.samples.layouts import Kind, Samples
from fxgrad.samples.symbols import Symbols, expression

Batches = tuple[int, int]
BATCHES: Batches = (2, 3)
LARGEST = 64

# Ops that make indices linear in the position and in B. Whatever else makes an index may have a threshold in it.
_LINEAR = frozenset(
    """arange zeros ones zeros_like ones_like new_zeros new_ones full add sub mul neg rsub to long int clone
    view reshape unsqueeze squeeze expand expand_as view_as reshape_as flatten unflatten t transpose permute contiguous
    repeat repeat_interleave size sym_size shape detach""".split()
)
_INDEXED = frozenset("getitem index_select index index_put index_add index_copy scatter_add".split())


class EveryBatch:
    """Chooses the sizes for one movement op after the other."""

    def __init__(self, symbols: Symbols, samples: Callable[[fx.Node], Any]) -> None:
        self.symbols = symbols
        self.samples = samples

    def sizes(self, node: fx.Node) -> Batches | None:
        """The two sizes; None where no two of them would speak for all."""
        if not all(map(self._is_linear, _numbers([node.args, dict(node.kwargs)]))):
            return None
        largest = max([0, *self._shifts(node), *self._thresholds(node)])
        if largest > LARGEST:
            return None
        return BATCHES if largest < BATCHES[0] else (largest + 1, largest + 2)

    def _is_linear(self, number: Any) -> bool:
        """Whether a number is ``a B + b``: no quotient, remainder, minimum or comparison of B."""
        found = expression(number)
        if self.symbols.symbol not in found.free_symbols:
            return True
        polynomial = found.as_poly(self.symbols.symbol)
        return polynomial is not None and polynomial.degree() == 1 and not found.atoms(sympy.Function)

    def _shifts(self, node: fx.Node) -> Iterator[int]:
        """By how much a roll moves samples."""
        if op_name(node.target) != "roll":
            return
        call = node.meta["call"]
        source = call.arguments["input"]
        shifts, dims = (_as_list(call.get(name)) for name in ("shifts", "dims"))
        samples = self.samples(source)
        for i, shift in enumerate(shifts):
            dim = dims[i] % max(1, source.meta["fake"].dim()) if dims else None
            layout = samples.layout if isinstance(samples, Samples) and samples.kind is Kind.BATCHED else None
            if dim is None or layout is None or dim == layout.dim:
                for number in _numbers(shift):
                    yield from self._plain(number)

    def _thresholds(self, node: fx.Node) -> Iterator[int]:
        """The numbers in what makes an index with a position for each sample."""
        if op_name(node.target).removesuffix("_") not in _INDEXED:
            return
        indices: list[fx.Node] = []
        fx.map_arg((node.args[1:], dict(node.kwargs)), indices.append)
        for index in indices:
            made = list(self._made_of(index))
            if any(self._holds_batch(one) for one in made) and not all(map(_is_linear_op, made)):
                for one in made:
                    for number in _numbers([one.args, dict(one.kwargs)]):
                        yield from self._plain(number)

    def _made_of(self, index: fx.Node) -> Iterator[fx.Node]:
        """A constant index and the calls that make it."""
        stack, seen = [index], {index}
        while stack:
            node = stack.pop()
            if node.op not in ("call_function", "call_method"):
                continue
            samples = self.samples(node)
            if isinstance(samples, Samples) and samples.kind is not Kind.CONSTANT:
                continue
            yield node
            fresh = [arg for arg in node.all_input_nodes if arg not in seen]
            seen.update(fresh)
            stack.extend(fresh)

    def _holds_batch(self, node: fx.Node) -> bool:
        fake = node.meta["fake"]
        sizes = fake.shape if isinstance(fake, Tensor) else [fake]
        return any(self.symbols.holds_batch(size) for size in sizes)

    def _plain(self, number: Any) -> Iterator[int]:
        """The absolute value of a number that is the same for every B."""
        if self.symbols.symbol not in expression(number).free_symbols:
            yield abs(int(self.symbols.evaluate(number, BATCHES[0])))


def _is_linear_op(node: fx.Node) -> bool:
    return op_name(node.target).removesuffix("_") in _LINEAR


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, tuple | list) else [value]


def _numbers(value: Any) -> Iterator[Any]:
    """The integers of a nest of arguments, those of nodes among them."""
    if isinstance(value, fx.Node):
        yield from _numbers(value.meta["fake"])
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
    elif isinstance(value, slice):
        yield from _numbers([value.start, value.stop, value.step])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        yield value
