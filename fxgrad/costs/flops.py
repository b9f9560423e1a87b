"""What a per-sample gradient costs, as expressions in the symbolic sizes.

Flops are counted as `torch.utils.flop_counter` does, two for a multiplication and an addition. Expressions hold
the symbols of `fxgrad.samples.symbols`: B, and whatever else changes from call to call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy
from torch import Tensor

from fxgrad.samples.symbols import Symbols, expression
from fxgrad.terms import OneHot, Patches, Term


def elements(value: Tensor) -> sympy.Expr:
    """The number of a tensor's elements."""
    return math.prod((expression(size) for size in value.shape), start=sympy.Integer(1))


def term_flops(term: Term) -> sympy.Expr:
    """What ``term.dense()`` computes: a product of matrices, a scatter, a convolution, or a sum."""
    factors = term.factors
    for i, factor in enumerate(factors):
        g = factors[1 - i] if len(factors) == 2 else factor
        if isinstance(factor, Patches):  # each element meets the weights of its window
            met = factor.input if factor.settings.transposed else g
            assert isinstance(met, Tensor)
            return 2 * elements(met) * math.prod(factor.kernel[1:])
        if isinstance(factor, OneHot):
            assert isinstance(g, Tensor)
            return elements(g)
    tensors = [factor for factor in factors if isinstance(factor, Tensor)]
    return _einsum_flops(term.equation, tensors)


def is_product(term: Term) -> bool:
    """Whether a term is what PyTorch's flop counter counts: no sum, no scatter."""
    return len(term.factors) > 1 and not any(isinstance(factor, OneHot) for factor in term.factors)


def _einsum_flops(equation: str, tensors: Sequence[Tensor]) -> sympy.Expr:
    """One factor: its sum. Several: two for each point of all indices together."""
    if len(tensors) == 1:
        return elements(tensors[0])
    sizes: dict[str, sympy.Expr] = {}
    inputs = equation.replace(" ", "").split("->")[0].split(",")
    for letters, tensor in zip(inputs, tensors, strict=True):
        shape = [expression(size) for size in tensor.shape]
        before, dots, after = letters.partition("...")
        middle = len(shape) - len(before) - len(after)
        if dots:
            rest = math.prod(shape[len(before) : len(before) + middle], start=sympy.Integer(1))
            sizes["..."] = rest if sizes.get("...", 1) == 1 else sizes["..."]
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(after, shape[len(shape) - len(after) :], strict=True))
    return 2 * math.prod(sizes.values(), start=sympy.Integer(1))


def at(cost: sympy.Expr, symbols: Symbols, batch: int) -> int | None:
    """The number a cost is at this many samples; None where only the data decides."""
    value = sympy.sympify(cost).subs(symbols.symbol, batch).subs(symbols.hints())
    return int(value) if value.is_number else None


def formula(cost: sympy.Expr, symbols: Symbols) -> str:
    """A cost as text in the symbols' names: ``24*B``."""
    names = {symbol: sympy.Symbol(name) for symbol, name in symbols.names.items()}
    return str(sympy.sympify(cost).subs(names))
