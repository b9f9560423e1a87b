"""The sizes at which a graph's samples are followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from fxgrad.samples.symbols import UNKNOWN, Symbols, expression

ROWS = 1 << 20
"""The ids of rows of packed data begin here: each row is one of its own, the next pack's another million on."""


@dataclass(frozen=True)
class Trial:
    """A number of samples, and a number for every other size that changes from call to call."""

    batch: int
    symbol: sympy.Symbol
    values: Mapping[sympy.Symbol, int]
    last: bool  # the largest: numbers in the graph are compared with its sizes
    known: dict[sympy.Expr, Any] = field(default_factory=dict)

    def number(self, size: Any) -> Any:
        """The number that a size, or another symbolic number, is in this trial."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        expr = expression(size) if not isinstance(size, torch.SymBool) else size.node.expr
        if expr not in self.known:
            numbers = {symbol: self.values.get(symbol, UNKNOWN) for symbol in expr.free_symbols}
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(size)]
            self.known[expr] = kind(expr.subs(numbers))
        return self.known[expr]

    def unknown(self, number: Any) -> set[sympy.Symbol]:
        """The symbols in a number that have a stand-in here: what was read from a tensor."""
        symbolic = isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
        return {symbol for symbol in number.node.expr.free_symbols if symbol not in self.values} if symbolic else set()

    def without_samples(self, number: Any) -> int:
        """What is left of ``a B + b`` where there are no samples: b."""
        if isinstance(number, torch.SymInt):
            expr = expression(number)
            return int(expr.subs({**dict.fromkeys(expr.free_symbols, UNKNOWN), **self.values, self.symbol: 0}))
        return number if isinstance(number, int) and not isinstance(number, bool) else 0

    def shape(self, shape: Any) -> list[int]:
        return [self.number(size) for size in shape]


def trials_of(symbols: Symbols) -> tuple[Trial, ...]:
    """Two that are small, where much is the same by chance, and two with no common divisor that are not."""
    hints = {symbol: int(value) for symbol, value in symbols.hints().items()}

    def trial(batch: int, times: int, *, last: bool = False) -> Trial:
        others = {symbol: value * times for symbol, value in hints.items()}
        return Trial(batch, symbols.symbol, {**others, symbols.symbol: batch}, last)

    return trial(2, 1), trial(3, 1), trial(67, 3), trial(131, 1, last=True)
