"""One forward with gradients, from its call to the end of its backward.

| state | entered by | fields |
|---|---|---|
| open | `Store.enter`, when the model is called | ``watched``: the autograd nodes that have a hook |
| waiting | `Store.leave`, when the call returns | ``placeholders``: autograd nodes, which keep the forward alive |
| running | `Store.begin_backward`, by the first node of a backward call | ``checked``: the id of that call |
| delivered | `Store.deliver`, once for each graph | ``delivered``, ``sent``, ``stored``: what the call has set |
| ended | `Store._end_backward`, after all else in the call | ``view`` is None; a retained graph goes back to running |
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fxgrad.host.autograd import current_task, will_execute
from fxgrad.host.modules import wrapped_by_ddp
from fxgrad.runtime.deliveries import Asked

_NUMBERS = itertools.count()


class WholeResults(NamedTuple):
    """What the graph of a whole step has computed."""

    names: tuple[str, ...]  # of its parameters
    grads: Sequence[Tensor | None]  # what a backward would bring to the gradient placeholders
    loss: Tensor
    steady: bool  # whether the graph writes to no input, and its results have the same layouts in every call


class Forward:
    """One forward with gradients: its samples, its trainable parameters, and its graphs' gradient placeholders."""

    compiled: Any = None  # the function that it called last, whose graphs Dynamo keeps
    repeats = False  # whether its inputs and parameters are known to be as those of the step before

    def __init__(
        self,
        size: int,
        parameters: Mapping[str, Tensor],
        sample_weight: Tensor | None = None,
        method: str = "forward",
        state: object = None,
    ) -> None:
        self.size, self.parameters, self.sample_weight, self.method = size, parameters, sample_weight, method
        self.state = state  # one for all forwards between which no parameter has changed; None where nobody knows
        self.names = tuple(parameters)
        self.number = next(_NUMBERS)
        self.call = 0  # its place among the model's calls, where several processes have to agree on it
        self.placeholders: list[Any] = []  # autograd nodes
        self.stands_for: int | None = None  # the number in place of a backward call's, where there is none
        self.computed: WholeResults | None = None  # of `forward_backward`, whose graph has run the backward
        self.outside: tuple[str, ...] = ()  # parameters seen in use where no transformed graph was
        self.asked: Asked | None = None  # of all parameters
        self.asked_by_graph: dict[tuple[str, ...], Asked] = {}  # of those that are not all
        # Reentrant checkpointing runs a forward and a graph task of its own inside of a backward call:
        # what it finds belongs to that call.
        self.enclosing = current_task()
        self.checked: int | None = None
        self.delivered: int | None = None  # the backward call that its results came from
        self.sent: set[str] = set()  # the parameters whose p.grad that call adds to
        self.view: Any = None  # the transformed model: with its guard it lives as long as this graph
        self.at_backward: list[Callable[[], None]] = []  # what to do as each backward call begins
        self.first_batch: Any = None  # the `FirstBatch` that is to check this forward's batch
        self.units: Any = None  # the `Division` of a model that several processes share
        self.sums: Any = None  # the `Sums` of `Units`
        self.weights: Any = None  # its weights in this forward
        self.gathered: Any = None  # what its graph gathers of them
        self.stored: dict[tuple[int, str], int] = {}  # by id(parameter) and place: what it set last
        # What averages p.grad at the end of a backward: its own callback comes after ours.
        around = wrapped_by_ddp()
        self.averaged = around is not None
        self.in_buckets = self.averaged and around.gradient_as_bucket_view and around.require_backward_grad_sync
        self.met = False  # whether it added to what another forward of the same call had set
        self.watched: set[Any] | None = None  # the nodes that `watch` has seen; only during the model's call

    def task(self) -> int:
        """Return the id of the running backward call, which is its graph task's."""
        if self.stands_for is not None:
            return self.stands_for
        return current_task() if self.enclosing == -1 else self.enclosing

    def reduces_at_once(self) -> bool:
        """Return whether the running backward adds to shards, and nothing to p.grad of whole parameters."""
        return self.sums is not None and self.sums.task is not None

    def delivers(self) -> bool:
        """Decide whether the running backward call reaches the parameters; ``autograd.grad(loss, x)`` does not."""
        return bool(self.outside) or any(map(will_execute, self.placeholders))


class CurrentForward(threading.local):
    """The forward of this thread; Dynamo passes nothing of it to the backend."""

    forward: Forward | None = None
