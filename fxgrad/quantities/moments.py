"""Elementwise moments of the per-sample gradients: sums over the samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxgrad.errors import names_checked
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.quantities.base import GRAD, Delivery, Quantity, like_parameters


@names_checked
@dataclass(frozen=True, repr=False)
class Grad(Quantity):
    """The ordinary gradient, for use together with other quantities.

    Delivers:
        ``p.grad += Σ_i g_i``, ``[*p.shape]`` in p's dtype. With ``loss_reduction="mean"`` this is B times the gradient
        of the mean.

    Args:
        group_size: how many consecutive rows of a batch are one sample; the sum does not change.

    Source: what ``loss.backward()`` adds to ``p.grad`` without fxgrad, for a loss that is a sum over samples.

    >>> import torch, fxgrad
    >>> both = [fxgrad.Grad(), fxgrad.NormSample()]
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=both, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> model.weight.grad[0].tolist(), tuple(model.weight.norm_sample.shape)
    ([5.0, 5.0, 5.0], (5,))
    """

    adds: ClassVar[bool] = True

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return like_parameters(GRAD, parameters)

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        ones = {g.accumulating: g.like.new_ones(n, dtype=g.accumulating) for g in grads}
        return [g.weighted(ones[g.accumulating]) for g in grads]


@names_checked
@dataclass(frozen=True, repr=False)
class SquaredGrad(Quantity):
    """The sum over the samples of their squared gradients, element by element.

    Delivers:
        ``p.squared_grad_sum = Σ_i g_i²``, ``[*p.shape]`` in p's dtype.

    Args:
        group_size: how many consecutive rows of a batch are one sample.

    Source: the second moment of BackPACK's ``SumGradSquared``; the diagonal of the empirical Fisher matrix, times B.

    >>> import torch, fxgrad
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=fxgrad.SquaredGrad(), backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> model.weight.squared_grad_sum[0].tolist()
    [5.0, 5.0, 5.0]
    """

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return like_parameters("squared_grad_sum", parameters)

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        return [g.squared().to(g.dtype) for g in grads]


@names_checked
@dataclass(frozen=True, repr=False)
class GradVariance(Quantity):
    """The unbiased variance of the gradients over the samples, element by element.

    Delivers:
        ``p.grad_variance = Σ_i (g_i - ḡ)² / (B - 1)``, ``[*p.shape]`` in p's dtype; NaN for fewer than two samples.

    Args:
        group_size: how many consecutive rows of a batch are one sample.

    Source: ``torch.var(grad_sample, 0)``; its trace is the noise of McCandlish et al. 2018, "An empirical model of
    large-batch training".

    >>> import torch, fxgrad
    >>> model = fxgrad.transform(torch.nn.Linear(1, 1), quantity=fxgrad.GradVariance(), backend="eager")
    >>> model(torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    >>> model.weight.grad_variance.tolist()
    [[1.0]]
    """

    accumulates: ClassVar[bool] = False

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return like_parameters("grad_variance", parameters)

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        return [g.variance().to(g.dtype) for g in grads]

    def unreached(self, delivery: Delivery, n: int) -> Tensor:
        zeros = super().unreached(delivery, n)
        return zeros if n > 1 else zeros.fill_(math.nan)
