"""A per-sample gradient as a small tensor network, kept lazy.

A rule does not return tensors ``[B, *shape]`` but what they are made of: a product of factors with the
sample dimension ``n`` in front, contracted by an einsum. The linear layer's weight gradient is

    Term("n...o, n...i -> noi", g, x)

Every quantity is an operation on terms, written once and not once per op. This file holds the one that
GradSample needs: ``dense``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxgrad.kernels import conv_weight_grad, products


@dataclass(frozen=True)
class OneHot:
    """A factor ``[n, k.., classes]`` that is 1 where ``ids`` says so; rows of ``padding_idx`` are 0."""

    ids: Tensor  # [n, k..]
    classes: int
    padding_idx: int | None = None


@dataclass(frozen=True)
class Patches:
    """A factor ``[n, k.., in/groups * kernel]``: the windows of ``input`` that a convolution looks at."""

    input: Tensor  # [n, k, channels, *space]
    kernel: tuple[int, ...]  # the weight's own shape
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


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
                return _scatter(factor, g)
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


def _einsum(equation: str, tensors: list[Tensor]) -> Tensor:
    """torch.einsum, and the commonest equation as the product of matrices that it is."""
    if len(tensors) == 2 and equation.replace(" ", "") == "n...o,n...i->noi":
        g, x = tensors
        return products(g.flatten(1, -2), x.flatten(1, -2))
    return torch.einsum(equation, *tensors)


def _scatter(rows: OneHot, g: Tensor) -> Tensor:
    """Σ_k onehot(ids_nk) ⊗ g_nk, as one scatter: ``[n, classes, features]``."""
    n = rows.ids.shape[0]
    ids = rows.ids.reshape(n, -1)
    features = g.shape[rows.ids.dim() :]
    g = g.reshape(n, ids.shape[1], math.prod(features))
    if rows.padding_idx is not None:
        g = g.masked_fill((ids == rows.padding_idx).unsqueeze(-1), 0)
    zeros = g.new_zeros(n, rows.classes, g.shape[-1])
    return zeros.scatter_add(1, ids.unsqueeze(-1).expand_as(g), g)
