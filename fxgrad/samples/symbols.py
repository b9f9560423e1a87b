"""The symbolic batch size B, and sizes as sympy expressions in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxgrad.host.dynamo import ConstantSource
from fxgrad.host.fake import FakeTensorMode
from fxgrad.host.pytree import tree_map


def expression(size: Any) -> sympy.Expr:
    """Return a size, an int or a SymInt, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else sympy.sympify(size)


def elements(value: torch.Tensor) -> sympy.Expr:
    """Return the number of a tensor's elements."""
    return math.prod((expression(size) for size in value.shape), start=sympy.Integer(1))


@lru_cache
def bends(expr: sympy.Expr, batch: sympy.Symbol) -> bool:
    """Decide whether an expression has a function of B in it, such as a quotient, a remainder or a minimum."""
    return any(batch in function.free_symbols for function in expr.atoms(sympy.Function))


UNKNOWN = 13  # a stand-in for a size that depends on data


@dataclass
class Symbols:
    """The symbolic sizes of the passes: B for the samples, and one symbol for each other dynamic dimension."""

    env: ShapeEnv = field(default_factory=lambda: ShapeEnv(duck_shape=False, specialize_zero_one=True))
    names: dict[sympy.Symbol, str] = field(default_factory=dict)
    rows: set[sympy.Symbol] = field(default_factory=set)  # row counts of packed data

    def __post_init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def new(self, name: str, hint: int) -> torch.SymInt:
        """Create a symbolic size, printed as ``name``; a number may be 0, 1 or negative, such as an int argument."""
        source = ConstantSource(f"__fxgrad_{name}_{len(self.names)}")
        size = hint > 1
        symbol = self.env.create_symbol(
            hint, source, DimDynamic.DYNAMIC, None, positive=size or None, do_not_specialize_zero_one=not size
        )
        node = self.env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(node, torch.SymInt)
        self.names[expression(node)] = name
        return node

    def batch(self, hint: int) -> torch.SymInt:
        """Create B, the symbol of all sample dimensions."""
        self.b = self.new("B", hint)
        self.symbol: sympy.Symbol = expression(self.b)
        return self.b

    def holds_batch(self, size: Any) -> bool:
        """Decide whether a size depends on B or on a row count of packed data."""
        return isinstance(size, torch.SymInt) and bool(expression(size).free_symbols & {self.symbol, *self.rows})

    def count_rows(self, size: Any) -> None:
        """Register a size as a row count of packed data."""
        self.rows |= expression(size).free_symbols

    def batch_dims(self, shape: Any) -> list[int]:
        """Return the dims of a shape that hold samples."""
        return [dim for dim, size in enumerate(shape) if self.holds_batch(size)]

    def specialised(self) -> bool:
        """Decide whether an op specialised B or a row count to a constant."""
        return not self.env.replacements.keys().isdisjoint({self.symbol, *self.rows})

    def settle(self) -> None:
        """Note that each number read of a tensor has its place: PyTorch's cond and scan trace no body before."""
        self.env.pending_fresh_unbacked_symbols.clear()

    def is_linear(self, number: Any) -> bool:
        """Decide whether a number is ``a B + b``, without a quotient, remainder, minimum or comparison of B."""
        expr = expression(number)
        if self.symbol not in expr.free_symbols:
            return True
        polynomial = expr.as_poly(self.symbol)
        return polynomial is not None and polynomial.degree() == 1 and not expr.atoms(sympy.Function)

    def shape(self, value: torch.Tensor, batch: int) -> list[int]:
        """Evaluate the sizes of a tensor at this batch size."""
        return [self.evaluate(size, batch) for size in value.shape]

    def evaluate_all(self, sizes: Any, batch: int) -> Any:
        """Evaluate each size in nested containers."""
        return tree_map(lambda size: self.evaluate(size, batch), sizes)

    def evaluate(self, size: Any, batch: int) -> Any:
        """Evaluate a size at this batch size, with other symbols at their hints."""
        if not isinstance(size, torch.SymInt | torch.SymFloat):
            return size
        value = expression(size).subs(self.symbol, batch).subs(self.hints())
        value = value.subs(dict.fromkeys(value.free_symbols, UNKNOWN))
        return float(value) if isinstance(size, torch.SymFloat) else int(value)

    def hints(self) -> Mapping[sympy.Symbol, Any]:
        hints = getattr(self.env, "backed_var_to_val", None)
        if hints is None:
            hints = self.env.var_to_val
        return hints

    def show(self, size: Any) -> str:
        """Format a size: ``B``, ``12*B``, ``7``."""
        if not isinstance(size, torch.SymInt):
            return str(size)
        names = {symbol: sympy.Symbol(name) for symbol, name in self.names.items()}
        return str(expression(size).subs(names))

    def show_shape(self, shape: Any) -> str:
        """Format a shape: ``[B, 7]``."""
        return f"[{', '.join(map(self.show, shape))}]"
