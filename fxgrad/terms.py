"""A per-sample gradient as a small tensor network, kept lazy.

A rule does not return tensors ``[B, *shape]`` but what they are made of: a product of factors with the
sample dimension ``n`` in front, contracted by an einsum. The linear layer's weight gradient is

    Term("n...o, n...i -> noi", g, x)

Every quantity is an operation on terms, written once and not once per op. This file holds the one
that multiplies a term out, ``dense``; `fxgrad.gradients.sample_grads` holds those that do not have to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fxgrad.operators.convolutions import Settings
from fxgrad.operators.dense import conv_weight_grad, products, scattered


@dataclass(frozen=True)
class OneHot:
    """A factor ``[n, k.., classes]`` that is 1 where ``ids`` says so; rows of ``padding_idx`` are 0."""

    ids: Tensor  # [n, k..]
    classes: int
    padding_idx: int | None = None

    @property
    def padding(self) -> int:
        """``padding_idx`` as operators have it: -1 for none."""
        return -1 if self.padding_idx is None else self.padding_idx


@dataclass(frozen=True)
class Patches:
    """A factor ``[n, k.., in/groups * kernel]``: the windows of ``input`` that a convolution looks at."""

    input: Tensor  # [n, k, channels, *space]
    kernel: tuple[int, ...]  # the weight's own shape
    settings: Settings


Factor = Tensor | OneHot | Patches


class Term:
    """One use of one parameter: ``factors`` contracted by an einsum ``equation``, samples first.

    ``shape`` is the parameter's shape where the equation's output has its sizes in other dimensions.
    """

    def __init__(self, equation: str, *factors: Factor, shape: Sequence[int] | None = None) -> None:
        self.equation = equation
        self.factors = factors
        self.shape = None if shape is None else tuple(shape)

    def dense(self) -> Tensor:
        """The gradient of every sample, ``[n, *shape]``."""
        out = self._contract()
        return out if self.shape is None else out.reshape(out.shape[0], *self.shape)

    def dtype(self) -> torch.dtype:
        """The gradient's."""
        values = [factor.input if isinstance(factor, Patches) else factor for factor in self.factors]
        return reduce(torch.promote_types, [value.dtype for value in values if isinstance(value, Tensor)])

    def product(self) -> tuple[Tensor, Tensor] | None:
        """g ``[n, k, o]`` and x ``[n, k, i]`` where the term is ``Σ_k g_nk ⊗ x_nk``; None for another one."""
        if self.equation.replace(" ", "") != "n...o,n...i->noi":
            return None
        g, x = self.factors
        if not (isinstance(g, Tensor) and isinstance(x, Tensor)):
            return None
        return _positions(g), _positions(x)

    def rows(self) -> tuple[OneHot, Tensor] | None:
        """ids ``[n, k]`` and g ``[n, k, d]`` where the term is the gradient of a table; None for another one."""
        table, g = self.factors[0], self.factors[-1]
        if not (isinstance(table, OneHot) and isinstance(g, Tensor)):
            return None
        ids = table.ids.reshape(table.ids.shape[0], -1)
        flat = g.reshape(ids.shape[0], ids.shape[1], math.prod(g.shape[table.ids.dim() :]))
        return OneHot(ids, table.classes, table.padding_idx), flat

    def windows(self) -> tuple[Tensor, Patches] | None:
        """g and the windows of a convolution's term; None for another one."""
        g, patches = self.factors[0], self.factors[-1]
        return (g, patches) if isinstance(g, Tensor) and isinstance(patches, Patches) else None

    def own_shape(self) -> tuple[int, ...]:
        """The shape of one sample's gradient."""
        if self.shape is not None:
            return self.shape
        table, windows = self.rows(), self.windows()
        if windows is not None:
            return windows[1].kernel
        if table is not None:
            return table[0].classes, table[1].shape[2]
        _, result = self.letters()
        sizes = self.sizes()
        return tuple(sizes[letter] for letter in result[1:])

    def letters(self) -> tuple[list[list[str]], list[str]]:
        """The equation's letters for each dim of each factor, and of the result; dims behind dots are counted back."""
        inputs, _, result = self.equation.replace(" ", "").partition("->")
        found = []
        for text, factor in zip(inputs.split(","), self.factors, strict=True):
            assert isinstance(factor, Tensor)
            before, dots, after = text.partition("...")
            middle = factor.dim() - len(before) - len(after) if dots else 0
            found.append([*before, *(f".{i}" for i in range(middle, 0, -1)), *after])
        return found, [*result]

    def sizes(self) -> dict[str, int]:
        """The size that each of the letters stands for."""
        letters, _ = self.letters()
        return {
            letter: size
            for names, factor in zip(letters, self.factors, strict=True)
            for letter, size in zip(names, factor.shape, strict=True)  # type: ignore[union-attr]
        }

    def _contract(self) -> Tensor:
        g = self.factors[0]
        for position, factor in enumerate(self.factors):
            if isinstance(factor, Patches):
                g = self.factors[1 - position]
                assert isinstance(g, Tensor)
                return conv_weight_grad(g, factor)
            if isinstance(factor, OneHot):
                g = self.factors[1 - position]
                assert isinstance(g, Tensor)
                return scattered(factor, g)
        tensors = [factor for factor in self.factors if isinstance(factor, Tensor)]
        return _einsum(self.equation, tensors)

    def scaled(self, scale: Callable[[Tensor], Tensor]) -> Term:
        """The term times a number, which ``scale`` multiplies into one of its factors."""
        factors: list[Factor] = list(self.factors)
        first, tensor = next((i, f) for i, f in enumerate(factors) if isinstance(f, Tensor))
        factors[first] = scale(tensor)
        return Term(self.equation, *factors, shape=self.shape)

    def __repr__(self) -> str:
        return f"Term({self.equation!r})"


def _positions(factor: Tensor) -> Tensor:
    """``[n, k.., features]`` with the positions as one dimension."""
    if factor.dim() == 3:
        return factor
    return factor.unsqueeze(1) if factor.dim() == 2 else factor.flatten(1, -2)


def _einsum(equation: str, tensors: list[Tensor]) -> Tensor:
    """torch.einsum, but products of matrices, and products of one entry with one entry, as what they are."""
    if len(tensors) == 2 and equation.replace(" ", "") == "n...o,n...i->noi":
        g, x = tensors
        return products(g.flatten(1, -2), x.flatten(1, -2))
    inputs, _, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if names.count(names[0]) == len(names):
        if names == [f"n...{result[1:]}"] and tensors[0].dim() == len(result) + 1 and is_one(tensors[0].shape[1]):
            return tensors[0].squeeze(1)  # nothing is added up
        return torch.einsum(f"{names[0]}->{result}", reduce(torch.mul, tensors))
    found = torch.einsum(equation, *tensors)
    shared = any(not name.startswith("n") for name in names)  # ones for a letter alone: the sum is expanded, not copied
    return found.clone(memory_format=torch.contiguous_format) if shared else found


def is_one(size: object) -> bool:
    """Whether a size is one for every batch."""
    return isinstance(size, int) and size == 1
