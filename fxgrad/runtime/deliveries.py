"""The deliveries of a forward, sorted by destination, each with its gradient placeholder.

A placeholder is an input of the graph with a result's shape, such as ``[B, *p.shape]``, over one element of memory
(stride 0). The compiled backward returns the result as its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.tensors import has_no_memory, is_view
from fxgrad.quantities import GRAD, RESULT, Delivery, Quantity

# For `map`, which adds no Python frame: they are read of each parameter in each step.
_dtype = attrgetter("dtype")
dtype_of_grad: Any = attrgetter("grad_dtype" if hasattr(Tensor, "grad_dtype") else "dtype")


class Kinds(NamedTuple):
    """The deliveries of one quantity by destination, each with its position among those of all quantities."""

    names: tuple[str, ...]  # of the parameters whose p.grad is added to
    grads: tuple[int, ...]  # their positions
    results: list[tuple[int, Delivery]]  # for `fxgrad.result`
    attributes: list[tuple[int, Delivery]]  # attributes of parameters


class Asked(NamedTuple):
    """The deliveries of a forward, or of the parameters of one of its graphs."""

    by_quantity: list[Kinds]
    every: list[Delivery]
    placeholders: list[Tensor]  # the gradient placeholders, one for each delivery
    attributes: frozenset[str]  # the names of the attributes that are set
    adds_to_grad: bool  # whether a delivery is added to p.grad


def by_place(deliveries: Sequence[Delivery], first: int) -> Kinds:
    """Sort one quantity's deliveries; ``first`` is the position of its first one among all."""
    grads: dict[str, int] = {}
    results: list[tuple[int, Delivery]] = []
    attributes: list[tuple[int, Delivery]] = []
    for i, delivery in enumerate(deliveries, first):
        if delivery.place == GRAD:
            grads[delivery.parameter or ""] = i
        elif delivery.place == RESULT:
            results.append((i, delivery))
        else:
            attributes.append((i, delivery))
    return Kinds(tuple(grads), tuple(grads.values()), results, attributes)


def placeholder(delivery: Delivery) -> Tensor:
    """Return a gradient placeholder: the shape of what will be delivered, over one element of memory."""
    strides = (0,) * len(delivery.shape)
    return torch.empty_strided(delivery.shape, strides, dtype=delivery.dtype, device=delivery.device)


def apart(result: Tensor, memories: set[int]) -> Tensor:
    """Return a result in memory of its own: the biases of ``a(x) + b(x)`` have one gradient."""
    if has_no_memory(result):
        return result.clone()
    if result.layout is torch.strided and result.numel():
        memory = result.untyped_storage().data_ptr()
        if memory in memories:
            return result.clone()
        memories.add(memory)
    return result


def ask(quantities: Sequence[Quantity], n: int, parameters: Mapping[str, Tensor]) -> Asked:
    """Ask the quantities what they deliver of n samples, and make a placeholder for each delivery."""
    kinds: list[Kinds] = []
    every: list[Delivery] = []
    for quantity in quantities:
        deliveries = quantity.deliveries(quantity.units(n), parameters)
        kinds.append(by_place(deliveries, len(every)))
        every += deliveries
    with torch.inference_mode(False), disable_current_modes():  # later calls use them again
        placeholders = [placeholder(delivery) for delivery in every]
    places = frozenset(one.place for one in every)
    return Asked(kinds, every, placeholders, places - {GRAD, RESULT}, GRAD in places)


def fit(arrived: Sequence[Any], parameters: Iterable[Tensor]) -> bool:
    """Return whether each of these is a tensor with a version of its own, in the dtype of its parameter's p.grad."""
    if any(map(is_, arrived, repeat(None))) or any(map(is_view, arrived)):
        return False
    return [*map(_dtype, arrived)] == [*map(dtype_of_grad, parameters)]


def for_grad(kinds: Kinds, grads: Sequence[Tensor | None], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what arrived for p.grad, by name: each a tensor with a version of its own, in the dtype of p.grad."""
    names = kinds.names
    arrived: Any = [*map(grads.__getitem__, kinds.grads)]
    if fit(arrived, map(parameters.__getitem__, names)):  # in most steps
        return dict(zip(names, arrived, strict=True))
    sent: dict[str, Tensor] = {}
    for name, grad in zip(names, arrived, strict=True):
        if grad is None:
            continue
        dtype = dtype_of_grad(parameters[name])
        if is_view(grad):  # views share one version, by which the guard knows them: each gets its own
            grad = grad.data
        sent[name] = grad if dtype is None or dtype is grad.dtype else grad.to(dtype)
    return sent
