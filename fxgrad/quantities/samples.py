"""`GradSample`: the per-sample gradients themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.quantities.base import Delivery, Quantity


@dataclass(frozen=True)
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

    def __str__(self) -> str:
        return "GradSample"
