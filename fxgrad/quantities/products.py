"""Inner products of the per-sample gradients, with directions and with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities.base import RESULT, Delivery, Quantity, first


@dataclass(frozen=True, eq=False)
class GradDot(Quantity):
    """Inner products of every sample's gradient with given directions.

    Delivers:
        ``<g_i, v>`` in ``fxgrad.result(model, quantity)``: ``[B]``, or ``[B, K]`` for K directions, in the first
        parameter's dtype, float32 for half types.

    Args:
        vectors: for each parameter's name a tensor ``[*p.shape]``, or ``[K, *p.shape]`` for all of them.
            The direction of other parameters is zero. In-place changes of a tensor apply from the next call on.
        group_size: how many consecutive rows of a batch are one sample.

    The cost is that of one more forward product per use, not that of the gradients.

    Raises:
        OptionError: in the first call, if a name is no trainable parameter or a shape does not match.

    Source: Pruthi et al. 2020, "TracIn"; a Jacobian-vector product, read from the backward.

    >>> import torch, fxgrad
    >>> layer = torch.nn.Linear(3, 2)
    >>> dots = fxgrad.GradDot({"bias": torch.tensor([1.0, 2.0])})
    >>> model = fxgrad.transform(layer, quantity=dots, backend="eager")
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> fxgrad.result(model, dots).tolist()
    [3.0, 3.0]
    """

    vectors: Mapping[str, Tensor]
    adds: ClassVar[bool] = True

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        p = first(parameters)
        several = self._several(parameters)
        return [Delivery(RESULT, None, (n,) if several is None else (n, several), accumulating(p.dtype), p.device)]

    def inputs(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return [
            Delivery("vector", name, tuple(self.vectors[name].shape), accumulating(p.dtype), p.device)
            for name, p in parameters.items()
            if name in self.vectors
        ]

    def values(self, forward: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        unknown = sorted(self.vectors.keys() - forward.parameters.keys())
        if unknown:
            raise OptionError(f"there are vectors for what is no trainable parameter: {', '.join(unknown)}")
        return [
            self.vectors[name].detach().to(p.device, accumulating(p.dtype))
            for name, p in parameters.items()
            if name in self.vectors
        ]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        left = iter(given)
        total: Tensor | None = None
        dtype = grads[0].accumulating
        for g in grads:
            if g.name not in self.vectors:
                continue
            vector = next(left)
            single = vector.dim() == len(g.shape)
            dots = g.dot(vector) if single else torch.stack([g.dot(v) for v in vector.unbind(0)], 1)
            total = dots.to(dtype) if total is None else total + dots.to(dtype)
        return [grads[0].like.new_zeros(n, dtype=dtype) if total is None else total]

    def _several(self, parameters: Mapping[str, Tensor]) -> int | None:
        """Return the number of directions; None for a single one."""
        counts: set[int | None] = set()
        for name, p in parameters.items():
            if name in self.vectors:
                shape = tuple(self.vectors[name].shape)
                if shape != tuple(p.shape) and shape[1:] != tuple(p.shape):
                    raise OptionError(
                        f"the vector for '{name}' has shape {list(shape)}, the parameter {list(p.shape)}",
                        advice="Give it the parameter's shape, or [K, *shape] for K directions.",
                    )
                counts.add(None if len(shape) == p.dim() else shape[0])
        if len(counts) > 1:
            raise OptionError("the vectors do not agree on the number of directions")
        return counts.pop() if counts else None


@dataclass(frozen=True)
class GradGram(Quantity):
    """All inner products of the per-sample gradients with each other.

    Delivers:
        ``<g_i, g_j>`` in ``fxgrad.result(model, quantity)``, ``[B, B]``, in the first parameter's dtype, float32 for
        half types.

    Args:
        group_size: how many consecutive rows of a batch are one sample.

    Source: the empirical neural tangent kernel of Jacot et al. 2018, for a scalar loss.

    >>> import torch, fxgrad
    >>> gram = fxgrad.GradGram()
    >>> model = fxgrad.transform(torch.nn.Linear(3, 1, bias=False), quantity=gram, backend="eager")
    >>> model(torch.eye(3)).sum().backward()
    >>> fxgrad.result(model, gram).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        like = first(parameters)
        return [Delivery(RESULT, None, (n, n), accumulating(like.dtype), like.device)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        total = grads[0].gram()
        for g in grads[1:]:
            total = total + g.gram().to(total.dtype)
        return [total]
