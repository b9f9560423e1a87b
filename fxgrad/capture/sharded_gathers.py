"""Whole parameters of a unit while a graph uses them, and in no other time of a step.

A graph asks for a unit's parameters before their first use, in the forward and again in the backward (kernels/
gathering.py). Graphs of different batch sizes may ask in different orders, or not at all; processes have to gather in
one. So each phase has an order of its own: units as the model has them, and backwards in the backward. Who asks for a
unit gathers those before it, too, and they are kept until they are asked for. What is left at the end of a phase is
gathered then, for the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxgrad.host import fsdp
from fxgrad.host.autograd import autograd_engine, current_task
from fxgrad.host.fsdp import State
from fxgrad.runtime.processes import collective


@dataclass
class Call:
    """What the graph of one call gathers: units by their places in the order of reduction, in the model's order."""

    groups: dict[int, Any]
    stay: bool = False  # whether they stay whole until the end of the backward


class Gathers:
    """What one model's graphs gather, phase after phase."""

    def __init__(self) -> None:
        self.call = Call({})  # the last one
        self.left: dict[int, Any] = {}  # in the order of the running phase
        self.whole: dict[int, Any] = {}  # of those, what stays whole
        self.ready: dict[int, list[Tensor]] = {}  # gathered, and not asked for yet
        self.task: int | None = None  # the backward whose phase is running

    def begin_forward(self, states: Sequence[State], order: Sequence[Any], by_graph: bool) -> None:
        """Gather what no graph gathers; of the others, let the empty parameters stand in their modules."""
        units = {id(group): unit for unit, group in enumerate(order)}
        by_graph = by_graph and current_task() == -1  # not in a reentrant checkpoint
        chosen = [group for group in fsdp.groups(states) if by_graph and fsdp.reshards_after_forward(group)]
        self.call = Call({units[id(group)]: group for group in chosen})
        self._begin(self.call.groups)
        self.task = None
        for group in fsdp.groups(states):
            if units[id(group)] not in self.call.groups:
                fsdp.gather_group(group)
        for group in chosen:
            fsdp.show_wholes(group)

    def end_call(self) -> None:
        """Let the shards of what no graph has gathered stand in their modules again, also when the call has raised."""
        for group in self.call.groups.values():
            fsdp.show_shards(group)

    @collective()
    def without_graph(self) -> None:
        """Gather all that is left, to stay whole: a batch without samples runs the model as it is."""
        self.call.stay = True
        self._gather_to_stay()

    def begin_backward(self, states: Sequence[State], call: Call, alone: bool) -> None:
        """Begin the phase of a backward through one call, once for a backward; gather what was freed meanwhile.

        ``alone``: no other model's collectives may come between.
        """
        if self.task == current_task():
            return
        self.task = current_task()
        own = {id(group) for group in call.groups.values()}
        for group in fsdp.groups(states):
            if id(group) not in own:
                fsdp.gather_group(group)
        self._begin(dict(reversed(call.groups.items())))
        if call.stay or not alone:
            for group in self.left.values():
                group.reshard()  # a process whose graph gathers does so again
            self._gather_to_stay()
        if call.groups:
            autograd_engine.queue_callback(self.end)

    @collective()
    def gather(self, unit: int, places: Sequence[int]) -> list[Tensor]:
        """Return copies of some of a unit's whole parameters; ``places`` are theirs in it."""
        if unit in self.whole:
            wholes = fsdp.wholes_of(self.whole[unit])
            return [wholes[place].detach().clone() for place in places]
        while unit not in self.ready:
            self._gather_next()
        every = self.ready.pop(unit)
        return [every[place] for place in places]

    @collective()
    def end(self) -> None:
        """Gather what no graph of this process has asked for in this phase."""
        while self.left:
            self._gather_next()
        self.ready = {}

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """End the phase behind a forward, also behind one that raises: the other processes end theirs."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # the first error is to be seen
                self.end()
            raise
        self.end()

    def _begin(self, groups: dict[int, Any]) -> None:
        self.left, self.ready, self.whole = dict(groups), {}, {}

    def _gather_to_stay(self) -> None:
        for group in self.left.values():
            fsdp.gather_group(group)
        self.whole, self.left = self.left, {}

    def _gather_next(self) -> None:
        assert self.left, "a graph has gathered a unit before, in the same phase"
        unit = next(iter(self.left))
        try:
            self.ready[unit] = fsdp.copies_of(self.left.pop(unit))
        except Exception:
            self.left = {}  # a collective failed: the next would wait for ever
            raise
