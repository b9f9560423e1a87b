"""Trials: the concrete sizes at which the proof follows the samples of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from fxgrad.samples.symbols import UNKNOWN, Symbols, expression

ROWS = 1 << 20
"""The first id of a row of packed data; each row has its own id, and each pack starts this many ids later."""


@dataclass(frozen=True)
class Trial:
    """A batch size, and a number for each other dynamic dimension."""

    batch: int
    symbol: sympy.Symbol
    values: Mapping[sympy.Symbol, int]
    last: bool  # the largest trial, with whose sizes the proof compares numbers in the graph
    known: dict[sympy.Expr, Any] = field(default_factory=dict)

    def number(self, size: Any) -> Any:
        """Return the number of a size, or of another symbolic number, in this trial."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        expr = expression(size) if not isinstance(size, torch.SymBool) else size.node.expr
        if expr not in self.known:
            numbers = {symbol: self.values.get(symbol, UNKNOWN) for symbol in expr.free_symbols}
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(size)]
            self.known[expr] = kind(expr.subs(numbers))
        return self.known[expr]

    def unknown(self, number: Any) -> set[sympy.Symbol]:
        """Return the symbols in a number that were read from a tensor, for which this trial has only a stand-in."""
        symbolic = isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
        return {symbol for symbol in number.node.expr.free_symbols if symbol not in self.values} if symbolic else set()

    def without_samples(self, number: Any) -> int:
        """Return the constant part b of a number ``a B + b``."""
        if isinstance(number, torch.SymInt):
            expr = expression(number)
            return int(expr.subs({**dict.fromkeys(expr.free_symbols, UNKNOWN), **self.values, self.symbol: 0}))
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
