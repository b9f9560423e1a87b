"""The two batch sizes at which a replay determines the layout for all batch sizes.

A movement op with sizes, shifts and indices linear in B maps positions by ``a i + b B + c``. If it keeps each sample in
place at B = 2 and B = 3, then a = 1 and b = c = 0. So it does at every B. Ops with thresholds differ:
``x.roll(6, 0)`` and ``x[arange(B) % 4]`` have no effect at three samples. So the replay takes two sizes above every
threshold (`thresholds.py`). For a threshold above `LARGEST`, fxgrad gives up: the samples count as lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import sympy
from torch import Tensor, fx

from fxgrad.ops.calls import CALL, op_name
from fxgrad.ops.facts import FAKE
from fxgrad.samples.layouts import Kind, Samples
from fxgrad.samples.symbols import Symbols, expression
from fxgrad.samples.thresholds import Thresholds, numbers

Batches = tuple[int, int]
BATCHES: Batches = (2, 3)
LARGEST = 64

_INDEXED = frozenset("getitem index_select index index_put index_add index_copy scatter_add".split())


class EveryBatch:
    """The choice of the two batch sizes, for one movement op at a time."""

    def __init__(
        self, symbols: Symbols, samples: Callable[[fx.Node], Any], constant: Callable[[fx.Node, int], Tensor]
    ) -> None:
        self.symbols = symbols
        self.samples = samples
        self.thresholds = Thresholds(symbols, samples, constant)

    def sizes(self, node: fx.Node) -> Batches | None:
        """Return the two batch sizes; None if no two of them determine all others."""
        if not all(map(self._is_linear, numbers([node.args, dict(node.kwargs)]))):
            return None
        largest: float = max([0, *self._shifts(node), *self._thresholds(node)])
        if largest > LARGEST:
            return None
        above = math.ceil(largest) + 1
        return BATCHES if largest < BATCHES[0] else (above, above + 1)

    def _is_linear(self, number: Any) -> bool:
        """Decide whether a number is ``a B + b``, without a quotient, remainder, minimum or comparison of B."""
        expr = expression(number)
        if self.symbols.symbol not in expr.free_symbols:
            return True
        polynomial = expr.as_poly(self.symbols.symbol)
        return polynomial is not None and polynomial.degree() == 1 and not expr.atoms(sympy.Function)

    def _shifts(self, node: fx.Node) -> Iterator[int]:
        """Yield the shifts by which a roll moves samples."""
        if op_name(node.target) != "roll":
            return
        call = CALL.of(node)
        source = call.arguments["input"]
        shifts, dims = (_as_list(call.get(name)) for name in ("shifts", "dims"))
        samples = self.samples(source)
        for i, shift in enumerate(shifts):
            dim = dims[i] % max(1, FAKE.of(source).dim()) if dims else None
            layout = samples.layout if isinstance(samples, Samples) and samples.kind is Kind.BATCHED else None
            if dim is None or layout is None or dim == layout.dim:
                for number in numbers(shift):
                    yield from self._plain(number)

    def _thresholds(self, node: fx.Node) -> Iterator[float]:
        """Yield the threshold of each index: the batch size from which its ops behave uniformly."""
        if op_name(node.target).removesuffix("_") not in _INDEXED:
            return
        indices: list[fx.Node] = []
        fx.map_arg((node.args[1:], dict(node.kwargs)), indices.append)
        yield from (self.thresholds.of(index) for index in indices if self.thresholds.depends(index))

    def _plain(self, number: Any) -> Iterator[int]:
        """Yield the absolute value of a number that does not depend on B."""
        if self.symbols.symbol not in expression(number).free_symbols:
            yield abs(int(self.symbols.evaluate(number, BATCHES[0])))


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, tuple | list) else [value]
