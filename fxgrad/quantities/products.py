"""Inner products of the per-sample gradients: with directions, with each other, and with random signs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxgrad.errors import OptionError, names_checked, nearest
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities.base import Delivery, Quantity, of_model

SEEDS = 1 << 32  # how many seeds of random signs there are


@names_checked
@dataclass(frozen=True, eq=False, repr=False)
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

    vectors: Mapping[str, Tensor] = field(repr=False)
    _names: ClassVar[frozenset[str]]  # of each object: a graph is made for these
    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_mapping = isinstance(self.vectors, Mapping)
        if not is_mapping or not all(isinstance(one, Tensor) for one in self.vectors.values()):
            value = self.vectors if not is_mapping else next(v for v in self.vectors.values() if not torch.is_tensor(v))
            raise OptionError(
                f"vectors has to be a dict of a tensor for each parameter's name, not {type(value).__name__}"
                + (" as a vector" if is_mapping else ""),
                advice="Pass one such as {name: direction for name, p in model.named_parameters()}, each of p's shape.",
            )
        object.__setattr__(self, "_names", frozenset(self.vectors))
        for name, vector in self.vectors.items():
            if not vector.is_floating_point():
                raise OptionError(
                    f"the vector for '{name}' has dtype {vector.dtype}", advice="Give it one of real floating point."
                )

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        several = self._several(parameters)
        return [of_model((n,) if several is None else (n, several), parameters)]

    def inputs(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return [
            Delivery("vector", name, tuple(self.vectors[name].shape), accumulating(p.dtype), p.device)
            for name, p in parameters.items()
            if name in self.vectors
        ]

    def values(self, forward: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        if self.vectors.keys() != self._names:
            raise OptionError(
                f"vectors are of {', '.join(sorted(self.vectors))}, and were of {', '.join(sorted(self._names))}",
                advice="Keep the names; vectors of zeros leave a parameter out.",
            )
        unknown = sorted(self.vectors.keys() - forward.parameters.keys())
        if unknown:
            raise OptionError(
                f"there are vectors for what is no trainable parameter: {', '.join(unknown)}",
                advice=nearest(unknown[0], forward.parameters, "Leave them out, or unfreeze the parameters."),
            )
        return [
            self.vectors[name].detach().to(p.device, accumulating(p.dtype))
            for name, p in parameters.items()
            if name in self.vectors
        ]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        dtype, asked = grads[0].accumulating, [g for g in grads if g.name in self.vectors]
        if not asked:  # one of several graphs; how many directions there are, the others know
            return [None]
        dots = [
            g.dot(vector) if vector.dim() == len(g.shape) else torch.stack([g.dot(v) for v in vector.unbind(0)], 1)
            for g, vector in zip(asked, given, strict=True)
        ]
        return [reduce(torch.add, [each.to(dtype) for each in dots])]

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
                if shape != tuple(p.shape) and not shape[0]:
                    raise OptionError(f"there are no directions for '{name}'", advice="Give it one or more.")
                counts.add(None if len(shape) == p.dim() else shape[0])
        if len(counts) > 1:
            raise OptionError(
                "the vectors do not agree on the number of directions",
                advice="Give each the parameter's shape, or all of them [K, *shape] with the same K.",
            )
        return counts.pop() if counts else None


@names_checked
@dataclass(frozen=True, repr=False)
class GradGram(Quantity):
    """All inner products of the per-sample gradients with each other.

    Delivers:
        ``<g_i, g_j>`` in ``fxgrad.result(model, quantity)``, ``[B, B]``, in the first parameter's dtype, float32 for
        half types. With ``all_processes`` ``[B, ΣB]``: the columns are the samples of process 0, then those of
        process 1, and so on.

    Args:
        all_processes: whether the samples of all processes of torch.distributed are meant. They have to hold the same
            parameters. Each backward then exchanges the factors of the per-sample gradients over the default group. So
            every process takes part in each; its batch may be empty.
        group_size: how many consecutive rows of a batch are one sample.

    Raises:
        OptionError: in the first call, if torch.distributed is not initialised; in the backward of every process, if
            they train different parameters.

    Source: the empirical neural tangent kernel of Jacot et al. 2018, for a scalar loss.

    >>> import torch, fxgrad
    >>> gram = fxgrad.GradGram()
    >>> model = fxgrad.transform(torch.nn.Linear(3, 1, bias=False), quantity=gram, backend="eager")
    >>> model(torch.eye(3)).sum().backward()
    >>> fxgrad.result(model, gram).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    all_processes: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.all_processes, bool):
            raise OptionError(
                f"all_processes has to be True or False, not {self.all_processes!r}",
                advice="Pass all_processes=True for products with the samples of other processes.",
            )

    def check(self, options: Any) -> None:
        if self.all_processes and not options.named:
            raise OptionError(
                'GradGram(all_processes=True) does not work with torch.compile(model, backend="fxgrad")',
                advice="Use fxgrad.transform(model, quantity=..).",
            )

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return [of_model((n, n), parameters)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        total = grads[0].gram()
        for g in grads[1:]:
            total = total + g.gram().to(total.dtype)
        return [total]


def of_one_process(quantity: Quantity) -> Quantity:
    """Return the same of this process's samples alone, where one process computes it while the others do not."""
    return replace(quantity, all_processes=False) if isinstance(quantity, GradGram) else quantity


@names_checked
@dataclass(frozen=True, repr=False)
class GradProjection(Quantity):
    """Random projections of the per-sample gradients, for data attribution.

    Delivers:
        ``P g_i / √dim`` in ``fxgrad.result(model, quantity)``, ``[B, dim]``, in the first parameter's dtype, float32
        for half types. P is a matrix of random signs with one column for each element of all parameters.

    Args:
        dim: the number of rows of P.
        seed: the seed of P, from 0 to 2**32 - 1. An entry of P depends only on the seed, the parameter's name and the
            element's index. It is the same for every batch size, device and order of parameters.
        group_size: how many consecutive rows of a batch are one sample.

    fxgrad computes P and the gradients one block of columns at a time and never stores them.

    Raises:
        OptionError: at once, if dim is not a positive int, or seed not one from 0 to 2**32 - 1.

    Source: Johnson and Lindenstrauss 1984; Achlioptas 2003 (signs); Park et al. 2023, "TRAK".

    >>> import torch, fxgrad
    >>> projection = fxgrad.GradProjection(dim=16, seed=0)
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=projection, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> tuple(fxgrad.result(model, projection).shape)
    (5, 16)
    """

    dim: int
    seed: int = 0  # below 2**32
    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 1:
            raise OptionError(
                f"dim has to be a positive int, not {self.dim!r}",
                advice="It is the number of projections, such as 512.",
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < SEEDS:
            raise OptionError(
                f"seed has to be an int from 0 to 2**32 - 1, not {self.seed!r}",
                advice="Pass one such as 0; seeds of other tools may be taken modulo 2**32.",
            )

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return [of_model((n, self.dim), parameters)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        dtype = grads[0].accumulating
        total = grads[0].like.new_zeros(n, self.dim, dtype=dtype)
        for g in grads:
            total = total + g.projected(self.dim, self.seed, zlib.crc32(g.name.encode())).to(dtype)
        return [total * self.dim**-0.5]
