"""Results of the model as a whole, by the place of their quantity in the list that was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.quantities import Quantity
from fxgrad.runtime import refusals

TASK = "_fxgrad_task"  # on a result that is an attribute of a parameter: the backward call that set it
_REPORTS = itertools.count(1)


class ModelResults(dict[int, list[Any]]):
    """The results of the last backward call, several forwards of which add up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, int] = {}  # by place: the backward call that has reported it
        # By place: what was there before the running call, and its call.
        self.replaced: dict[int, tuple[list[Any] | None, int]] = {}
        self.running: int | None = None  # the call that has reported last
        self.last = 0  # the number of the last report, among those of all models

    def has(self, place: int, task: int) -> bool:
        """Return whether a backward call has reported this."""
        return place in self and self.calls[place] == task

    def report(self, place: int, quantity: Quantity, results: list[Tensor], task: int) -> None:
        """Set a quantity's results, or add them to those of another forward of the call."""
        if task != self.running:
            self.running = task
            self.replaced.clear()
        if self.has(place, task):
            pairs = list(zip(self[place], results, strict=True))
            if other := next((pair for pair in pairs if pair[0].shape != pair[1].shape), None):
                raise refusals.two_shapes(quantity, *other)
            results = [torch.add(*pair) for pair in pairs]
        else:
            self.replaced.setdefault(place, (self.get(place), self.calls.get(place, task)))
        self[place], self.calls[place], self.last = results, task, next(_REPORTS)

    def withdraw(self) -> None:
        """Let all be as before the running call, which ends in an error."""
        for place, (before, call) in self.replaced.items():
            self.pop(place, None)
            if before is not None:
                self[place], self.calls[place] = before, call
        self.replaced.clear()


def task_of(result: Sequence[Tensor] | Tensor | None) -> int | None:
    """Return the backward call that set a result, or the last of several."""
    return getattr(result[-1] if isinstance(result, list) else result, TASK, None)
