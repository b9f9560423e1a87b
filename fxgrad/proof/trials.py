"""Trials: the concrete sizes at which the proof follows the samples of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from fxgrad.samples.symbols import UNKNOWN, Symbols

ROWS = 1 << 20
"""The first id of a row of packed data; each row has its own id, and each pack starts this many ids later."""


Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool


def symbols_of(number: Any) -> set[sympy.Symbol]:
    """Return the symbols in a number; a plain number has none."""
    return number.node.expr.free_symbols if isinstance(number, Symbolic) else set()


def symbols_in(numbers: Iterable[Any]) -> set[sympy.Symbol]:
    return set().union(*map(symbols_of, numbers))


def rows_of(pack: int, count: int) -> torch.Tensor:
    """Return the ids of the rows of packed data."""
    return torch.arange(count, dtype=torch.int32) + ROWS * (pack + 1)


@dataclass(frozen=True)
class Trial:
    """A batch size, and a number for each other dynamic dimension."""

    batch: int
    symbol: sympy.Symbol
    values: Mapping[sympy.Symbol, int]
    last: bool  # the largest trial, with whose sizes the proof compares numbers in the graph
    known: dict[tuple[sympy.Expr, int], Any] = field(default_factory=dict)

    def number(self, size: Any) -> Any:
        """Return the number of a size, or of another symbolic number, in this trial."""
        return self._at(size, self.batch) if isinstance(size, Symbolic) else size

    def _at(self, number: Any, batch: int) -> Any:
        expr = number.node.expr
        if (expr, batch) not in self.known:
            numbers = {symbol: self.values.get(symbol, UNKNOWN) for symbol in expr.free_symbols}
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(number)]
            self.known[expr, batch] = kind(expr.subs({**numbers, self.symbol: batch}))
        return self.known[expr, batch]

    def unknown(self, number: Any) -> set[sympy.Symbol]:
        """Return the symbols in a number that were read from a tensor, for which this trial has only a stand-in."""
        return {symbol for symbol in symbols_of(number) if symbol not in self.values}

    def without_samples(self, number: Any) -> int:
        """Return the constant part b of a number ``a B + b``."""
        if isinstance(number, torch.SymInt):
            return int(self._at(number, 0))
        return number if isinstance(number, int) and not isinstance(number, bool) else 0

    def shape(self, shape: Any) -> list[int]:
        return [self.number(size) for size in shape]


def trials_of(symbols: Symbols) -> tuple[Trial, ...]:
    """Return two trials of small sizes, and two of large sizes without a common divisor.

    At small sizes, different sizes may coincide by chance.
    """
    hints = {symbol: int(value) for symbol, value in symbols.hints().items()}

    def trial(batch: int, times: int, *, last: bool = False) -> Trial:
        others = {symbol: value * times for symbol, value in hints.items()}
        return Trial(batch, symbols.symbol, {**others, symbols.symbol: batch}, last)

    return trial(2, 1), trial(3, 1), trial(67, 3), trial(131, 1, last=True)
