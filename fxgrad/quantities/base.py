"""What a quantity is: what a backward delivers, and how that is made of the per-sample gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fxgrad.gradients.sample_grads import SampleGrads

GRAD = "grad"  # the place of what is added to p.grad, as any gradient is
RESULT = "result"  # the place of what belongs to no parameter alone: fxgrad.result(model, quantity)


Outside = Literal["error", "allow", "unchecked"]  # what a guarded p.grad takes besides what fxgrad delivered
OUTSIDE: tuple[Outside, ...] = ("error", "allow", "unchecked")


@dataclass(frozen=True)
class Delivery:
    """One tensor that a backward delivers."""

    place: str  # an attribute of the parameter, or `RESULT`
    parameter: str | None  # whose it is; None for the model's
    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Quantity(ABC):
    """A quantity of the user's own subclasses this.

    ``group_size=K`` makes K consecutive rows of a batch one sample: augmentations of one image, or one user's data.
    Its gradient is the sum of theirs, and every result has B / K rows.

    `deliveries` says what a backward delivers, `compute` makes it, in the same order, of every parameter's
    gradients: `SampleGrads.dense` multiplies them out, `norms`, `weighted` and `dot` do not have to.

    >>> import torch, fxgrad
    >>> class Largest(fxgrad.Quantity):
    ...     def deliveries(self, n, parameters):
    ...         return [fxgrad.Delivery("largest", name, (n,), p.dtype, p.device) for name, p in parameters.items()]
    ...     def compute(self, grads, n, given):
    ...         return [g.dense().abs().flatten(1).amax(1) for g in grads]
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), quantity=Largest(), backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> model.weight.largest.tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """

    group_size: int = field(default=1, kw_only=True)  # consecutive rows that count as one sample

    adds: ClassVar[bool] = False  # whether the results of several forwards of one backward may be added
    dense: ClassVar[bool] = False  # whether it multiplies every gradient out: then that is done use by use
    guards_grad: ClassVar[bool] = False  # whether nothing but what it delivers may be added to p.grad
    alone: ClassVar[bool] = False  # whether it speaks of one sample alone: no value in which samples met is returned
    sums: ClassVar[bool] = True  # whether it may ask for a weighted sum, which the cost model then counts

    def units(self, n: Any) -> Any:
        """How many samples n rows are."""
        return n if self.group_size == 1 else n // self.group_size

    @abstractmethod
    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        """What a backward over n samples delivers, for these trainable parameters."""

    @abstractmethod
    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        """The deliveries, in order; ``grads`` has one entry for each parameter, ``given`` what `inputs` names."""

    def inputs(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        """What it needs at each call besides the gradients: shapes and dtypes, in order."""
        return []

    def values(self, forward: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors that `inputs` names, for one forward."""
        return []

    def check(self, options: Any) -> None:  # noqa: B027 - most have nothing to check
        """Raise OptionError where it does not go with the other options."""

    def arrived(self, results: Sequence[Tensor | None]) -> None:  # noqa: B027
        """Look at what belongs to the model, before anything is stored: raising leaves everything as it was."""

    def __str__(self) -> str:
        return type(self).__name__


def first(parameters: Mapping[str, Tensor]) -> Tensor:
    """The parameter whose dtype and device results of the whole model have."""
    return next(iter(parameters.values()))
