"""Any einsum of tensors: a sum over positions, a product of several factors.

A sum of m products errs by at most γ(m) times the sum of their absolute values (`fxgrad.kernels.norms`). Of one
factor, or of several that are multiplied entry by entry, those are added up beside the sum itself. Of others, the
contraction of absolute values is at most the product of the factors' norms (Cauchy and Schwarz), times √m where m
values are added up that meet no other factor. Of one factor alone, of one position, nothing is computed at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from fxgrad.kernels.factors import Factor
from fxgrad.kernels.norms import CHAIN, frobenius, in_a_row
from fxgrad.kernels.precision import rounding_of_factors, unit
from fxgrad.kernels.sums import entry_sums, measured_sums
from fxgrad.ops.equation import SAMPLE, Equation, Subscripts
from fxgrad.samples.symbols import elements, expression
from fxgrad.terms.base import Term, is_one
from fxgrad.terms.part import Materialised

MADE = 4  # roundings that an entry of a term's one factor may have behind it: a rule's product, a complex one


class Einsum(Term):
    """A term of tensors alone."""

    @classmethod
    def takes(cls, equation: Equation, factors: Sequence[Factor]) -> bool:
        return all(isinstance(factor, Tensor) for factor in factors)

    def contracted(self) -> Tensor:
        """`torch.einsum`, but products of one entry with one entry as what they are."""
        tensors, equation = self.tensors(), self.equation
        if not self._is_entrywise():
            out = torch.einsum(str(equation), *tensors)
            # ones for a letter alone: the sum is expanded, not copied
            return out.clone(memory_format=torch.contiguous_format) if equation.has_shared_operand else out
        if self._sums_one_position():
            return tensors[0].squeeze(1)  # nothing is added up
        return entry_sums(tensors, self._entries())

    def _is_entrywise(self) -> bool:
        return self.equation.is_entrywise and len(set(self._ranks())) == 1

    def _sums_one_position(self) -> bool:
        (first, *others), output = self.tensors(), self.equation.output
        if others or output is None or self.equation.inputs[0] != Subscripts(SAMPLE, True, output.before[1:]):
            return False
        return first.dim() == len(output.before) + 1 and is_one(first.shape[1])

    def result_shape(self) -> tuple[int, ...]:
        sizes = self.sizes()
        return tuple(sizes[name] for name in self.equation.output_names(self._ranks())[1:])

    def sizes(self) -> dict[str, Any]:
        """Return the size that each of the equation's names stands for."""
        return self.equation.sizes([value.shape for value in self.tensors()])

    def _ranks(self) -> list[int]:
        return [value.dim() for value in self.tensors()]

    def _summed(self) -> Any:
        """Return how many products an entry of the result adds up."""
        sizes = self.sizes()
        return math.prod(sizes[name] for name in self.equation.summed(self._ranks()))

    def rounding(self, made: float | None = None) -> Tensor:
        tensors, products = self.tensors(), self._summed()
        if len(tensors) == 1 and is_one(products):
            return tensors[0].new_zeros(tensors[0].shape[0], dtype=torch.float64)  # nothing is multiplied or added up
        relative = in_a_row(products, self.dtype()) + (self._made() if made is None else made)
        if self._is_entrywise():
            return relative * frobenius(entry_sums([value.abs() for value in tensors], self._entries()))
        relative = relative + rounding_of_factors(tensors[0])
        bound: Tensor = torch.ones((), dtype=torch.float64, device=tensors[0].device)
        bound = bound * relative * self._summed_alone() ** 0.5
        for operand, value in zip(self.equation.inputs, tensors, strict=True):
            bound = bound * frobenius(value if operand.before.startswith(SAMPLE) else value.unsqueeze(0))
        return bound

    def _made(self) -> float:
        """Return how far a rule may have rounded the entries of a single factor: a complex product is two and a sum."""
        return MADE * unit(self.dtype()) if len(self.factors) == 1 else 0

    def _summed_alone(self) -> Any:
        """Return the values that are added up and meet no other factor."""
        names, sizes = self.equation.names(self._ranks()), self.sizes()
        alone = (name for name in self.equation.summed(self._ranks()) if sum(name in own for own in names) == 1)
        return math.prod(sizes[name] for name in alone)

    def materialised(self) -> Materialised:
        if self.is_complex or self._is_long():
            return self._in_wide_numbers(self._made())
        return self._materialised()

    def _materialised(self) -> Materialised:
        products = self._summed()
        if not self._is_entrywise() or is_one(products) or not isinstance(products, int):
            return super()._materialised()
        relative = in_a_row(products, self.dtype()) + self._made()
        return self._measured(*measured_sums(self.tensors(), self._entries(), relative))

    def _entries(self) -> str:
        """Return the equation of one operand, the product of all."""
        return f"{self.equation.inputs[0]}->{self.equation.output}"

    def _is_long(self) -> bool:
        """Return whether more products are added up than a kernel would add one after another."""
        return bool(guard_or_true(self._summed() > CHAIN))  # a size read from data (packed lengths) may be

    def grouped(self, size: int) -> Term:
        """Sum over the samples of a group as one more letter."""
        tensors = [
            value.reshape(value.shape[0] // size, size, *value.shape[1:])
            if operand.before.startswith(SAMPLE)
            else value
            for operand, value in zip(self.equation.inputs, self.tensors(), strict=True)
        ]
        return Term(self.equation.in_groups(), *tensors, shape=self.shape)

    def _products(self) -> Any:
        sizes = (size for name, size in self.sizes().items() if name != SAMPLE)
        return math.prod(sizes) if len(self.factors) > 1 else 0

    def in_flop_counter(self) -> bool:
        return len(self.factors) > 1

    def flops(self) -> sympy.Expr:
        """Return one factor: its sum. Several: two for each point of all indices together."""
        if len(self.factors) == 1:
            return elements(self.tensors()[0])
        return 2 * math.prod(map(expression, self.sizes().values()), start=sympy.Integer(1))
