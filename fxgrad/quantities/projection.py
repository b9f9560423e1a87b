"""Random projections of the per-sample gradients, for data attribution."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities.base import RESULT, Delivery, Quantity, first


@dataclass(frozen=True)
class GradProjection(Quantity):
    """Random projections of the per-sample gradients, for data attribution.

    Delivers:
        ``P g_i / √dim`` in ``fxgrad.result(model, quantity)``, ``[B, dim]``, in the first parameter's dtype, float32
        for half types. P is a matrix of random signs with one column for each element of all parameters.

    Args:
        dim: the number of rows of P.
        seed: the seed of P. An entry of P depends only on the seed, the parameter's name and the element's index. It is
            the same for every batch size, device and order of parameters.
        group_size: how many consecutive rows of a batch are one sample.

    fxgrad computes P and the gradients one block of columns at a time and never stores them.

    Raises:
        OptionError: at once, if dim is not a positive int.

    Source: Johnson and Lindenstrauss 1984; Achlioptas 2003 (signs); Park et al. 2023, "TRAK".

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
        like = first(parameters)
        return [Delivery(RESULT, None, (n, self.dim), accumulating(like.dtype), like.device)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        dtype = grads[0].accumulating
        total = grads[0].like.new_zeros(n, self.dim, dtype=dtype)
        for g in grads:
            total = total + g.projected(self.dim, self.seed, zlib.crc32(g.name.encode())).to(dtype)
        return [total * self.dim**-0.5]
