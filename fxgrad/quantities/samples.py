"""The per-sample gradients themselves, and their norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxgrad.errors import names_checked
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.norms import is_wide, root_sum_squares
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities.base import Delivery, Quantity, of_model


@names_checked
@dataclass(frozen=True, repr=False)
class GradSample(Quantity):
    """The gradient with respect to each sample's own copy of each parameter.

    Delivers:
        ``p.grad_sample``, ``[B, *p.shape]`` in p's dtype: row i is dL/dW(i). ``p.grad`` stays None.

    Args:
        group_size: how many consecutive rows of a batch are one sample; the result then has B / group_size rows.

    Source: PyTorch's ``torch.nn.utils._per_sample_grad`` and Opacus's ``GradSampleModule`` name it the same.

    >>> import torch, fxgrad
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=fxgrad.GradSample(), backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> tuple(model.weight.grad_sample.shape)
    (5, 2, 3)
    """

    adds: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return [Delivery("grad_sample", name, (n, *p.shape), p.dtype, p.device) for name, p in parameters.items()]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        return [g.dense().to(g.dtype).contiguous() for g in grads]


@names_checked
@dataclass(frozen=True, repr=False)
class NormSample(Quantity):
    """The L2 norm of every sample's gradient.

    Delivers:
        ``p.norm_sample``, ``[B]``, and in ``fxgrad.result(model, quantity)`` the norms over all parameters, ``[B]``.
        Both in p's dtype, float32 for half types.

    Args:
        group_size: how many consecutive rows of a batch are one sample.

    If the norm follows from the layer's factors, no weight gradient is computed, neither per sample nor summed.

    Source: Goodfellow 2015, "Efficient per-example gradient computations" (one position per sample); Li et al. 2022,
    "Large language models can be strong differentially private learners" (Gram matrices, for several positions).

    >>> import torch, fxgrad
    >>> norms = fxgrad.NormSample()
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=norms, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> tuple(model.weight.norm_sample.shape), round(float(fxgrad.result(model, norms)[0]) ** 2)
    ((5,), 8)
    """

    sums: ClassVar[bool] = False
    alone: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        of_parameters = [
            Delivery("norm_sample", name, (n,), accumulating(p.dtype), p.device) for name, p in parameters.items()
        ]
        return [*of_parameters, of_model((n,), parameters)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        norms = [g.norms() for g in grads]
        total = root_sum_squares(norms, any(is_wide(g.dtype) for g in grads))[0]
        of_parameters = [norm[0].to(g.accumulating) for norm, g in zip(norms, grads, strict=True)]
        return [*of_parameters, total.to(grads[0].accumulating)]
