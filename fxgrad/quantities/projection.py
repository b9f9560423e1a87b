"""Random projections of the per-sample gradients, as data attribution uses them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.precision import accumulating
from fxgrad.quantities.base import RESULT, Delivery, Quantity, first


@dataclass(frozen=True)
class GradProjection(Quantity):
    """``P g_i`` for a random sign matrix P / √dim (Johnson and Lindenstrauss; TRAK, Park et al. 2023): ``[B, dim]``.

    In ``fxgrad.result(model, quantity)``. An entry of P is a function of the seed, the parameter's name and the
    element's index alone: the same for every batch size, device and order of parameters. P and the
    gradients are made a block of columns at a time.

    >>> import torch, fxgrad
    >>> projection = fxgrad.GradProjection(dim=16, seed=0)
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=projection, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> tuple(fxgrad.result(model, projection).shape)
    (5, 16)
    """

    dim: int
    seed: int = 0
    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 1:
            raise OptionError(f"dim has to be a positive int, not {self.dim!r}")

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        one = first(parameters)
        return [Delivery(RESULT, None, (n, self.dim), accumulating(one.dtype), one.device)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        dtype = grads[0].accumulating
        total = grads[0].like.new_zeros(n, self.dim, dtype=dtype)
        for g in grads:
            total = total + g.projected(self.dim, self.seed, zlib.crc32(g.name.encode())).to(dtype)
        return [total * self.dim**-0.5]
