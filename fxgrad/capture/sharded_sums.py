"""Clipped sums that FSDP2 reduces unit after unit, within the backward: few gradients are whole at a time.

The norms need all of the backward. Behind them, in the same graph, the weighted sums of one unit are computed, handed
over (kernels/handing.py), reduced to shards and freed, before those of the next unit. The reduced parts wait until the
backward ends: one that raises leaves p.grad as it was.

A process without samples reduces zeros where the others hand over: in the node at which autograd reaches the
parameters. All processes go through the units in one order. Where one setting does not fit, the sums of all units go
the ordinary way: through autograd to p.grad of whole parameters, which FSDP2 reduces when the backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxgrad.capture.sharded_gathers import Gathers
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.host import fsdp
from fxgrad.host.autograd import current_task
from fxgrad.host.fsdp import State
from fxgrad.host.tensors import hooks_of
from fxgrad.kernels.handing import RECEIVERS, hand_over, number_of
from fxgrad.quantities import ClippedGrad, GradDot, GradGram, GradProjection, GradVariance, NormSample, SquaredGrad
from fxgrad.quantities.base import Quantity, values_of
from fxgrad.runtime.autograd_graph import accumulates
from fxgrad.runtime.deliveries import Kinds
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.processes import collective
from fxgrad.runtime.slot import Slot

_NO_GRADIENT = (NormSample, GradDot, GradGram, GradProjection, SquaredGrad, GradVariance)
"""Quantities that add nothing to p.grad."""


@dataclass(frozen=True, eq=False, repr=False)
class ClippedByUnit(ClippedGrad):
    """A clipped sum that hands over one unit of FSDP2 after the other."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict, kw_only=True, repr=False)
    receiver: int = field(default=0, kw_only=True, repr=False)
    in_graph: list[int] = field(default_factory=list, kw_only=True, repr=False)  # units that the graph gathers

    def weighted_sums(
        self, grads: Sequence[SampleGrads], weight: Tensor, group_of: Mapping[str, int]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the weights, and the sums of parameters in no unit; those of units are handed over."""
        units: dict[int, list[SampleGrads]] = {}
        for g in grads:
            if g.name in self.places:
                units.setdefault(self.places[g.name][0], []).append(g)
        for unit, ones in sorted(units.items()):
            rows = weight.unbind(0)
            places = [self.places[g.name][1] for g in ones]
            weight = hand_over(weight, [g.weighted(rows[group_of[g.name]]) for g in ones], self.receiver, unit, places)
        rows = weight.unbind(0)
        return weight, [None if g.name in self.places else g.weighted(rows[group_of[g.name]]) for g in grads]

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, ClippedGrad.__name__)


class Sums:
    """Receives the clipped sums of one model's units.

    At most one backward at a time hands over. `begin` decides for all of its units whether they are reduced at once.
    """

    def __init__(self, waits: Callable[[], bool]) -> None:
        self.waits = waits  # whether a forward of the model waits for its backward
        self.number = number_of(self)
        self.places: dict[str, tuple[int, int]] = {}  # by name: the unit in the order of reduction, its parameter there
        self.groups: list[Any] = []
        self.hands_over = False  # whether a quantity of the model is a `ClippedByUnit`
        self.task: int | None = None  # the backward that reduces at once
        self.reduced: list[tuple[Any, Tensor]] = []  # shards and their parts, until the backward ends
        self.done = 0  # how many units it has reduced
        self.left: dict[int, Tensor] = {}  # by id(whole): sums that go the ordinary way
        self.gathers = Gathers()
        self.in_graph: list[int] = []  # the units that graphs of the running call gather
        self.by_graph = False  # whether graphs may

    def by_unit(self, quantities: Sequence[Quantity]) -> tuple[Quantity, ...]:
        """Let a ClippedGrad hand over, where nothing else goes to p.grad."""
        clips = [q for q in quantities if type(q) is ClippedGrad and q.outside == "error"]
        if len(clips) != 1 or not all(q is clips[0] or type(q) in _NO_GRADIENT for q in quantities):
            return tuple(quantities)
        self.hands_over = True
        (clip,) = clips
        own = ClippedByUnit(**values_of(clip), places=self.places, receiver=self.number, in_graph=self.in_graph)
        return tuple(own if q is clip else q for q in quantities)

    def learn(self, parameters: Mapping[str, Tensor]) -> None:
        """Learn the units in the order of reduction, and which parameters each has, once all are whole."""
        names = {id(whole): name for name, whole in parameters.items()}
        for unit, group in enumerate(self.groups):
            for i, whole in enumerate(fsdp.wholes_of(group)):
                if id(whole) in names:
                    self.places[names[id(whole)]] = unit, i

    def begin(self, forward: Forward, states: Sequence[State], guarded: bool) -> None:
        """Decide how the sums of a backward go, before it runs."""
        self.reduced, self.done, self.left, self.task = [], 0, {}, None
        if self.hands_over and guarded and self._fits(forward, states):
            self.task = current_task()

    def alone(self) -> bool:
        """Return whether no other sharded model waits for its backward."""
        return not any(one is not self and one.waits() for one in _all_sums())

    def _fits(self, forward: Forward, states: Sequence[State]) -> bool:
        """Return whether all gradients of this backward are handed over, and every process can reduce them there."""
        if not self.alone() or forward.enclosing != -1 or not fsdp.reduces_at_once(states):
            return False
        if any(_watched(whole) for group in self.groups for whole in fsdp.wholes_of(group)):
            return False
        used = {name for node in forward.placeholders for name in getattr(node, "names", forward.parameters)}
        return all(accumulates(forward.parameters[name]) for name in used)  # not so under `backward(inputs=..)`

    @collective()
    def receive(self, unit: int, places: Sequence[int], sums: Sequence[Tensor]) -> None:
        """Take the sums of one unit's parameters."""
        wholes = fsdp.wholes_of(self.groups[unit])
        given = {id(wholes[place]): one for place, one in zip(places, sums, strict=True)}
        if self.task is None or self.task != current_task():
            # They stay until the backward ends, and a compiler reuses their memory behind the operator.
            self.left |= {key: one.clone() for key, one in given.items()}
            return
        self.gathers.end()
        self._reduce_before(unit)
        self._reduce(given)

    def with_left(
        self, kinds: Kinds, grads: Sequence[Tensor | None], parameters: Mapping[str, Tensor]
    ) -> Sequence[Tensor | None]:
        """Put the sums that go the ordinary way in the places where a graph returned nothing for them."""
        if not self.left:
            return grads
        every = list(grads)
        for i, name in zip(kinds.grads, kinds.names, strict=True):
            if every[i] is None:
                every[i] = self.left.pop(id(parameters[name]), None)
        return every

    @collective()
    def zeros(self) -> None:
        """Reduce units to which this process adds nothing: all of them without samples, or those that no op used."""
        self.gathers.end()
        if self.task is not None:
            self._reduce_before(len(self.groups))

    def _reduce_before(self, unit: int) -> None:
        while self.done < unit:
            self._reduce({})

    def _reduce(self, given: Mapping[int, Tensor]) -> None:
        """Reduce the next unit."""
        group = self.groups[self.done]
        wholes = [whole for whole in fsdp.wholes_of(group) if whole.requires_grad]
        assert given.keys() <= set(map(id, wholes))
        self.done += 1
        if wholes:
            self.reduced += fsdp.reduce_group(group, [_as_kept(given.get(id(whole)), whole) for whole in wholes])

    def end(self) -> bool:
        """Reduce what is left; return whether this backward has reduced at once."""
        self.zeros()
        return self.task is not None

    @torch.no_grad()
    def deliver(self) -> None:
        """Add the reduced parts to p.grad of the shards; FSDP2's streams have been waited for."""
        for shard, part in self.reduced:
            if shard.grad is None:
                shard.grad = part
            else:
                fsdp.local_part(shard.grad).add_(fsdp.local_part(part))  # as FSDP2 adds
        self.reduced, self.task = [], None


def _all_sums() -> list[Sums]:
    return [one for one in list(RECEIVERS.values()) if isinstance(one, Sums)]


def _watched(whole: Tensor) -> bool:
    """Return whether the user has put hooks on a whole parameter, which wait for its gradient."""
    return any(type(hook) is not Slot for hook in (hooks_of(whole) or {}).values())


def _as_kept(gradient: Tensor | None, whole: Tensor) -> Tensor:
    """Return a gradient as p.grad has it: laid out as the parameter, in its dtype; zeros for none."""
    if gradient is None:
        return torch.zeros_like(whole)
    dtype = getattr(whole, "grad_dtype", None) or gradient.dtype
    return gradient.detach().to(dtype).contiguous()
