"""The symbol B, and sizes as sympy expressions in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


def expression(size: Any) -> sympy.Expr:
    """A size, number or SymInt, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else sympy.sympify(size)


UNKNOWN = 13  # in place of a size that only the data decides


def hint(size: Any) -> int:
    """A size, or for one that changes from call to call what it was in the first."""
    node = getattr(size, "node", None)
    if node is None:
        return int(size)
    return int(node.hint) if node.hint is not None else 64


@dataclass
class Symbols:
    """The passes' own symbolic sizes: B for the samples, others for what else changes from call to call."""

    env: ShapeEnv = field(default_factory=lambda: ShapeEnv(duck_shape=False, specialize_zero_one=True))
    names: dict[sympy.Symbol, str] = field(default_factory=dict)
    rows: set[sympy.Symbol] = field(default_factory=set)  # the numbers of rows of packed data

    def __post_init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def new(self, name: str, hint: int) -> torch.SymInt:
        """A fresh symbolic size, printed as ``name``."""
        source = ConstantSource(f"__fxgrad_{name}_{len(self.names)}")
        symbol = self.env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
        node = self.env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(node, torch.SymInt)
        self.names[expression(node)] = name
        return node

    def batch(self, hint: int) -> torch.SymInt:
        """The one symbol that the sample dimensions carry."""
        self.b = self.new("B", hint)
        self.symbol: sympy.Symbol = expression(self.b)
        return self.b

    def holds_batch(self, size: Any) -> bool:
        """Whether a size changes with the number of samples, or of their rows in packed data."""
        return isinstance(size, torch.SymInt) and bool(expression(size).free_symbols & {self.symbol, *self.rows})

    def count_rows(self, size: Any) -> None:
        """Take a size for the number of rows of packed data."""
        self.rows |= expression(size).free_symbols

    def batch_dims(self, shape: Any) -> list[int]:
        """The dims of a shape that hold samples."""
        return [dim for dim, size in enumerate(shape) if self.holds_batch(size)]

    def specialised(self) -> bool:
        """Whether some op fixed B, or a number of rows, to a number."""
        return not self.env.replacements.keys().isdisjoint({self.symbol, *self.rows})

    def evaluate(self, size: Any, batch: int) -> Any:
        """The number a size is at this many samples, other symbols at their hints."""
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
        """A size as text: ``B``, ``12*B``, ``7``."""
        if not isinstance(size, torch.SymInt):
            return str(size)
        names = {symbol: sympy.Symbol(name) for symbol, name in self.names.items()}
        return str(expression(size).subs(names))

    def show_shape(self, shape: Any) -> str:
        """A shape as text: ``[B, 7]``."""
        return f"[{', '.join(map(self.show, shape))}]"
