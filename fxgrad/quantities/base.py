"""The interface of quantities: the tensors that a backward delivers, computed from the per-sample gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fxgrad.errors import OptionError
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.precision import accumulating

GRAD = "grad"  # the place of tensors that are added to p.grad, like any gradient
RESULT = "result"  # the place of tensors of the whole model: fxgrad.result(model, quantity)


Outside = Literal["error", "allow", "unchecked"]  # the policy for foreign gradients at a guarded p.grad
OUTSIDE: tuple[Outside, ...] = ("error", "allow", "unchecked")


@dataclass(frozen=True)
class Delivery:
    """One tensor that a backward delivers, as `Quantity.deliveries` lists it.

    Attributes:
        place: an attribute of the parameter; "grad" adds to ``p.grad``; "result" is for ``fxgrad.result``.
        parameter: the name of its parameter; None for a tensor of the whole model.
        shape: its shape.
        dtype: its dtype.
        device: its device.

    >>> import torch, fxgrad
    >>> fxgrad.Delivery("norm_sample", "weight", (5,), torch.float32, torch.device("cpu")).place
    'norm_sample'
    """

    place: str  # an attribute of the parameter, or `RESULT`
    parameter: str | None  # its parameter; None for the whole model
    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False, repr=False)
class Quantity(ABC):
    """The base class of quantities, which a backward computes from the per-sample gradients; subclass it for new ones.

    A subclass defines two methods. `deliveries` lists the tensors that a backward delivers. `compute` returns these
    tensors in the same order, from the gradients of each parameter. `SampleGrads.dense` materialises the gradients;
    `norms`, `weighted` and `dot` need not.

    `compute` is traced once. It may write to the tensors that it gets. The numbers that it reads, such as
    ``self.rate``, have to stay: fxgrad refuses a step after a change.

    Delivers:
        The tensors of `deliveries`: attributes of parameters, or ``fxgrad.result(model, quantity)``.

    Args:
        group_size: K makes K consecutive rows of a batch one sample: augmentations of one image, or one user's data.
            Its gradient is the sum over these rows, and every result has B / K rows.

    Source: the extensions of BackPACK (Dangel et al. 2020), with the gradients kept as factors.

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
    accumulates: ClassVar[bool] = True  # whether results of several backwards may be added, by accumulate="sum"
    dense: ClassVar[bool] = False  # whether it materialises every gradient, which is then done use by use
    guards_grad: ClassVar[bool] = False  # whether only its deliveries may be added to p.grad
    alone: ClassVar[bool] = False  # whether it describes single samples, so that outputs which mix samples are refused
    sums: ClassVar[bool] = True  # whether it may need a weighted sum, which the cost model then counts

    @property
    def own(self) -> bool:
        """Return whether the quantity is fxgrad's own and not a user's."""
        return type(self).__module__.startswith("fxgrad.")

    def units(self, n: Any) -> Any:
        """Return the number of samples in n rows."""
        return n if self.group_size == 1 else n // self.group_size

    @abstractmethod
    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        """List the deliveries of a backward over n samples, for these trainable parameters."""

    @abstractmethod
    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Compute the deliveries in order, None for zeros.

        ``grads`` has one entry per parameter, ``given`` the tensors of `inputs`.
        """

    def inputs(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        """List the shapes and dtypes of the tensors that `compute` needs besides the gradients, in order."""
        return []

    def values(self, forward: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensors of `inputs` for one forward."""
        return []

    def functions(self) -> list[Callable[..., Any]]:
        """Return the user's functions that the backward calls: they are traced once."""
        return []

    def check(self, options: Any) -> None:  # noqa: B027 - most have no check
        """Raise OptionError if the quantity conflicts with the other options."""

    def arrived(self, results: Sequence[Tensor | None]) -> None:  # noqa: B027
        """Inspect the results of the whole model before any delivery is stored; raising leaves all as it was."""

    def unreached(self, delivery: Delivery, n: int) -> Tensor:
        """Return a delivery of n samples whose gradients are all zero, as no backward reached the parameters."""
        return torch.zeros(delivery.shape, dtype=delivery.dtype, device=delivery.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantity:
        """Return the same object: copies of a transformed model are asked for the same, and follow the same tensors."""
        return self

    def __repr__(self) -> str:
        """Show the fields that are not the default, as the constructor takes them."""
        positional = [one for one in fields(self) if one.default is MISSING and one.repr]
        shown = [f"{_short(getattr(self, one.name))}" for one in positional]
        for one in fields(self):
            value = getattr(self, one.name)
            if one.default is not MISSING and one.repr and value is not one.default and value != one.default:
                shown.append(f"{one.name}={_short(value)}")
        return f"{type(self).__name__}({', '.join(shown)})" if shown else type(self).__name__


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()})" if value.dim() else repr(value.item())
    return getattr(value, "__name__", None) or repr(value)


def first(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the parameter that gives results of the whole model their dtype and device."""
    return next(iter(parameters.values()))


def of_model(shape: tuple[Any, ...], parameters: Mapping[str, Tensor]) -> Delivery:
    """Describe one result of the whole model, in the dtype in which norms and sums are taken."""
    like = first(parameters)
    return Delivery(RESULT, None, shape, accumulating(like.dtype), like.device)


def like_parameters(place: str, parameters: Mapping[str, Tensor]) -> list[Delivery]:
    """Describe one result for each parameter, of its shape and dtype."""
    return [Delivery(place, name, tuple(p.shape), p.dtype, p.device) for name, p in parameters.items()]


def check_deliveries(quantities: Sequence[Quantity], n: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise where two results have one place on a parameter, or where a tensor keeps something else there."""
    taken: dict[tuple[str, str | None], Quantity] = {}
    for quantity in quantities:
        for delivery in quantity.deliveries(quantity.units(n), parameters):
            place, name = delivery.place, delivery.parameter
            if place == RESULT:
                continue
            if name is None or name not in parameters:
                raise OptionError(
                    f"{quantity} delivers p.{place} of {name!r}, which is no trainable parameter here",
                    advice=f"Deliver to the parameters that it gets, or to {RESULT!r} for the whole model.",
                )
            if place == GRAD and tuple(delivery.shape) != tuple(parameters[name].shape):
                raise OptionError(
                    f"{quantity} delivers p.grad of '{name}' as {list(delivery.shape)}, and p has the shape "
                    f"{list(parameters[name].shape)}",
                    advice="Sum over the samples.",
                )
            if place != GRAD and (not place.isidentifier() or hasattr(nn.Parameter, place)):
                raise OptionError(
                    f"{quantity} delivers p.{place}, which is no free attribute of a parameter",
                    advice="Give the Delivery another place, such as 'largest'.",
                )
            if (place, name) in taken:
                raise OptionError(
                    f"p.{place} of '{name}' is delivered twice, by {taken[place, name]} and by {quantity}",
                    advice="Ask for one of them, and transform the model once more for the other.",
                )
            taken[place, name] = quantity


def checked_results(
    quantity: Quantity, results: Sequence[Tensor | None], n: int, parameters: Mapping[str, Tensor]
) -> Sequence[Tensor | None]:
    """Return what a quantity computed, and raise if it is not what the quantity has said that it delivers."""
    results, expected = list(results), quantity.deliveries(quantity.units(n), parameters)
    if len(results) != len(expected):
        raise OptionError(
            f"{quantity}.compute returned {len(results)} tensors for its {len(expected)} deliveries",
            advice="Return one for each Delivery, in their order; None stands for zeros.",
        )
    for result, delivery in zip(results, expected, strict=True):
        if result is not None and (not isinstance(result, Tensor) or tuple(result.shape) != tuple(delivery.shape)):
            shape = f"shape {list(result.shape)}" if isinstance(result, Tensor) else f"type {type(result).__name__}"
            whose = f" of '{delivery.parameter}'" if delivery.parameter else ""
            raise OptionError(
                f"{quantity}.compute returned a value of {shape} for {delivery.place}{whose}, "
                f"which it delivers as {list(delivery.shape)}",
                advice="Let deliveries() and compute() agree.",
            )
    return results


def values_of(one: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, as they are: another kind is made of them, with fields of its own."""
    return {each.name: getattr(one, each.name) for each in fields(one)}
