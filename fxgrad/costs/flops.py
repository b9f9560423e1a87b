"""What a per-sample gradient costs, as expressions in the symbolic sizes.

Flops are counted as `torch.utils.flop_counter` does, two for a multiplication and an addition. Expressions hold
the symbols of `fxgrad.samples.symbols`: B, and whatever else changes from call to call.
"""

from __future__ import annotations

import sympy

from fxgrad.samples.symbols import Symbols


def at(cost: sympy.Expr, symbols: Symbols, batch: int) -> int | None:
    """Return the number a cost is at this many samples; None where only the data decides."""
    value = sympy.sympify(cost).subs(symbols.symbol, batch).subs(symbols.hints())
    return int(value) if value.is_number else None


def formula(cost: sympy.Expr, symbols: Symbols) -> str:
    """Return a cost as text in the symbols' names: ``24*B``."""
    names = {symbol: sympy.Symbol(name) for symbol, name in symbols.names.items()}
    return str(sympy.sympify(cost).subs(names))
