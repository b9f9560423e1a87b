"""Hand weighted sums over inside of a backward, some parameters after the others, and free them.

    weight = hand_over(weight, sums, ..)     of one unit; what is summed by the new weights comes behind it
    own = hand_gradients(own, tensors, ..)   per-sample gradients of one parameter, as factors

The samples' weights go through the operator. So no compiler can compute the sums of the next unit before those of this
one are received, and none can leave the operator out.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fxgrad.kernels.operators import operator


class Receiver(Protocol):
    """Takes weighted sums while a backward runs."""

    def receive(self, unit: int, places: Sequence[int], sums: Sequence[Tensor]) -> None:
        """Take the sums of one unit; ``places`` says to which of its parameters each belongs."""


class GradientReceiver(Protocol):
    """Takes per-sample gradients while a backward runs."""

    def receive_gradients(
        self, tensors: Sequence[Tensor], numbers: Sequence[int], layout: str, lines: Sequence[int], name: str
    ) -> None:
        """Take the gradients of one parameter: a scale, and what `Packed` is made of."""


RECEIVERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number_of(receiver: Receiver | GradientReceiver) -> int:
    """Enter a receiver, as long as it lives; a graph holds its number."""
    number = next(_NUMBERS)
    RECEIVERS[number] = receiver
    return number


def _fake(weight: Tensor, sums: Sequence[Tensor], receiver: int, unit: int, places: Sequence[int]) -> Tensor:
    return torch.empty_like(weight)


# A recorded CUDA graph would replay without the receiver. The tag is of torch 2.12.
UNRECORDED = [tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None]


@operator(_fake, tags=UNRECORDED)
def hand_over(weight: Tensor, sums: Sequence[Tensor], receiver: int, unit: int, places: Sequence[int]) -> Tensor:
    """See the head of this file; returns the weights."""
    RECEIVERS[receiver].receive(unit, places, sums)
    return weight.clone()


@operator(lambda own, *_: torch.empty_like(own), tags=UNRECORDED)
def hand_gradients(
    own: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    layout: str,
    lines: Sequence[int],
    name: str,
    receiver: int,
) -> Tensor:
    """Hand over the per-sample gradients of one parameter, as `Packed` has them; returns ``own``, any result."""
    RECEIVERS[receiver].receive_gradients(tensors, numbers, layout, lines, name)
    return own.clone()
