"""SimpleFSDP: parameters are DTensors, and properties of the modules' classes make whole local tensors of them.

    gather      every DTensor's property is read once, in one order on each process
    call        modules without these properties: whole local parameters stand in their places
    reduce      at the end of the backward, autograd takes each whole gradient back through what the property did

The properties' own work decides dtypes, placements and the reduction. A property that does anything but
``redistribute`` and ``to_local`` is refused. All parameters are whole from the call to the end of the backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.capture.division import Division, check_unhooked
from fxgrad.capture.gathering_properties import (
    ADVICE,
    Place,
    Whole,
    kind_of,
    places_of,
    read,
    refused,
    same_bits,
    shares_memory,
    without,
)
from fxgrad.capture.options import Options
from fxgrad.capture.sharded_results import LOCAL, move_local
from fxgrad.errors import OptionError
from fxgrad.host.autograd import autograd_engine, current_task, retains_graph
from fxgrad.host.fsdp import manages
from fxgrad.host.modules import held_by, wrapped_by_ddp
from fxgrad.runtime.deliveries import Asked
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.guard import Guard
from fxgrad.runtime.processes import collective


class Lease:
    """A forward's hold on what was gathered for it."""

    def __init__(self, wholes: Mapping[int, Whole]) -> None:
        self.wholes = wholes
        self.retained = False  # whether a backward has kept its graph


class Properties(Division):
    """The gathering properties of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shards_by_id: dict[int, Any] = {}
        self.leaves: dict[int, nn.Parameter] = {}  # by id() of the DTensor: what stands for it in calls
        self.proved: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()  # of what
        self.kinds: dict[tuple[type, frozenset[str]], type] = {}
        self.wholes: dict[int, Whole] = {}  # by id() of the DTensor; none outside of a step
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # of forwards that wait for a backward
        self.running: tuple[int, list[Lease]] = (-1, [])  # a backward call, and the forwards that run in it
        self.reducing = -1  # the backward call at whose end the gradients are reduced
        self.adds = False  # whether that call adds to p.grad
        places_of(model)

    def settle(self, options: Options, policy: str) -> Options:
        """Each process computes what it would alone."""
        return options

    @contextlib.contextmanager
    def whole(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Let the model be an ordinary one with whole parameters for a call; yields the call's arguments."""
        places = places_of(self.model)
        self._check_alone(places)
        with collective():
            self._enter({id(shard): (shard, self._read(shard, where)) for shard, where in places})
        undo: list[Callable[[], None]] = []
        try:
            keys: dict[nn.Module, dict[str, nn.Parameter]] = {}
            for shard, where in places:
                for _, module, key in where:
                    keys.setdefault(module, {})[key] = self.leaves[id(shard)]
            for module, leaves in keys.items():
                self._replace(module, leaves, undo)
            yield args, kwargs
        finally:
            for act in reversed(undo):
                act()
            self.free()

    def _check_alone(self, places: Sequence[tuple[Any, Sequence[Place]]]) -> None:
        """Refuse what waits for gradients of the DTensors by autograd."""
        if wrapped_by_ddp() is not None or manages(shard for shard, _ in places):
            raise OptionError(
                "DistributedDataParallel or FSDP2 around a model whose parameters a property gathers is not supported",
                advice="Use one of them alone.",
            )
        for shard, (place, *_) in places:
            check_unhooked(place.name, shard)

    def _read(self, shard: Any, places: Sequence[Place]) -> Whole:
        """Read the property of a DTensor's first place; those of the others once, as they have to be the same."""
        first, *others = places
        changed = not all(self._is_proved(shard, place) for place in places)
        whole = read(shard, first, compares=changed)
        for place in others if changed else ():
            other = read(shard, place, compares=True)
            if other.chain.settings != whole.chain.settings or other.value.dtype is not whole.value.dtype:
                raise refused(first, "two modules have it, and their properties gather or reduce it differently")
        for place in places if changed else ():
            self.proved.setdefault(place.module, {})[place.key] = type(place.module), id(shard)
        return whole

    def _is_proved(self, shard: Any, place: Place) -> bool:
        """Return whether the property of this class has once returned the values of this DTensor."""
        return self.proved.get(place.module, {}).get(place.key) == (type(place.module), id(shard))

    def _enter(self, made: Mapping[int, tuple[Any, Whole]]) -> None:
        """Let leaves have the gathered values, and what the user may have changed on the DTensors."""
        wholes = {key: whole for key, (_, whole) in made.items()}
        kept = bool(self.leases) and self._are_same(wholes)
        if not kept:
            self.wholes = wholes
        self.shards_by_id = {key: shard for key, (shard, _) in made.items()}
        leaves: dict[int, nn.Parameter] = {}
        for key, whole in self.wholes.items():
            shard, data, leaf = self.shards_by_id[key], whole.value.detach(), self.leaves.get(key)
            if not kept:
                data = data.clone() if shares_memory(data, shard) else data  # a step may write where it is
                if leaf is None or kind_of(leaf) != kind_of(data):
                    leaf = nn.Parameter(data)
                leaf.data = data
            assert leaf is not None
            if current_task() == -1:  # what a backward that raised has left
                leaf.grad = None
            leaf.requires_grad_(shard.requires_grad)
            move_local(shard, leaf)
            leaves[key] = leaf
        self.leaves = leaves

    def _are_same(self, wholes: Mapping[int, Whole]) -> bool:
        """Return whether these are the values that waiting forwards have, gathered in the same way."""
        if wholes.keys() != self.wholes.keys():
            return False
        return all(
            whole.chain.settings == self.wholes[key].chain.settings and same_bits(whole.value, self.leaves[key])
            for key, whole in wholes.items()
        )

    def _replace(self, module: nn.Module, leaves: Mapping[str, nn.Parameter], undo: list[Callable[[], None]]) -> None:
        """Put whole parameters in the places of a module's properties."""
        held, kind = held_by(module)[0], type(module)
        undo.append(partial(setattr, module, "__class__", kind))
        keys = frozenset(leaves)
        if (kind, keys) not in self.kinds:
            self.kinds[kind, keys] = without(kind, keys)
        module.__class__ = self.kinds[kind, keys]
        for key, leaf in leaves.items():
            undo.append(partial(held.__setitem__, key, held[key]))
            held[key] = leaf
            if getattr(module, key) is not leaf:
                raise OptionError(
                    f"{kind.__name__}.{key} is a DTensor that the class reaches in a way of its own", advice=ADVICE
                )

    # A backward

    def enter(self, forward: Forward) -> None:
        super().enter(forward)
        forward.weights = Lease(self.wholes)
        self.leases.add(forward.weights)

    def gather(self, weights: Lease, gathered: None) -> None:
        """Raise where the parameters of a forward are not those that it had."""
        if weights not in self.leases:
            raise OptionError(
                "the whole parameters of a forward are freed at the end of its backward",
                advice="Pass retain_graph=True to each backward() but the last.",
            )
        if weights.wholes is not self.wholes:
            raise OptionError(
                "parameters of a sharded model changed between a forward and its backward, which would mix old and new",
                advice="Call backward() first, then optimizer.step() or load_state_dict().",
            )

    def begin(self, forward: Forward, guarded: bool) -> None:
        """Note the forwards of a backward call, too."""
        super().begin(forward, guarded)
        if self.running[0] != current_task():
            self.running = current_task(), []
        forward.weights.retained = retains_graph()
        self.running[1].append(forward.weights)

    def replaced(self) -> Collection[int]:
        return self.shards_by_id.keys()

    def reduce(self, task: int, adds: bool, parameters: Mapping[str, Tensor], rows: int) -> None:
        """Reduce p.grad behind the last callback of a backward call, once for all its forwards."""
        self.adds = adds or (self.adds and self.reducing == task)
        if self.reducing != task:
            self.reducing = task
            autograd_engine.queue_callback(self._reduce)

    @collective()
    def _reduce(self) -> None:
        self.reducing = -1
        parts: list[tuple[Any, Any]] = []
        for key, whole in self.wholes.items():
            leaf, shard = self.leaves[key], self.shards_by_id[key]
            move_local(leaf, shard)
            grad, leaf.grad = leaf.grad, None
            if self.adds and leaf.requires_grad:  # every process reduces the same, whatever its samples used
                grad = torch.zeros_like(leaf) if grad is None else grad
                (part,) = torch.autograd.grad(whole.value, whole.source, grad, retain_graph=True)
                parts.append((shard, part))
        _add(parts)
        for lease in self.running[1]:
            if not lease.retained:
                self.leases.discard(lease)
        self.running = -1, []
        self.free()

    def free(self) -> None:
        """Free the whole parameters, unless a forward waits for its backward."""
        if self.leases or not self.wholes:
            return
        self.wholes = {}
        for leaf in self.leaves.values():
            leaf.data = leaf.data.new_empty(()).expand(leaf.shape)

    # Parameters

    def check(self, asked: Asked, parameters: Mapping[str, Tensor]) -> None:
        """Refuse a result that would stand on a DTensor and belong to the whole parameter."""
        for kinds in asked.by_quantity:
            for _, delivery in kinds.attributes:
                if delivery.place != LOCAL:
                    raise OptionError(
                        f"{delivery.place} of a parameter belongs to the whole parameter, and SimpleFSDP keeps shards",
                        advice="Ask for ClippedGrad, Grad, NormSample, GradDot, GradGram or GradProjection, or use "
                        "DistributedDataParallel.",
                    )

    def parameters(self) -> list[nn.Parameter]:
        """Return all DTensors and whole parameters; the model holds either the ones or the others."""
        return [one for key, leaf in self.leaves.items() for one in (self.shards_by_id[key], leaf)]

    def shards(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the DTensor in place of each whole parameter."""
        of = {id(leaf): self.shards_by_id[key] for key, leaf in self.leaves.items()}
        return {name: of.get(id(parameter), parameter) for name, parameter in parameters.items()}

    def guard(self, guard: Guard, parameters: Mapping[str, Tensor]) -> None:
        """Guard the DTensors, to which nothing of ours is added by autograd."""
        for name, shard in self.shards(parameters).items():
            guard.join(name, shard)

    def all_shards(self) -> list[Tensor]:
        """Return every DTensor, in an order that all processes share."""
        return [shard for shard, _ in places_of(self.model)]

    def check_averages(self) -> None:
        raise OptionError(
            "make_private does not know models whose parameters a property gathers",
            advice="Use DistributedDataParallel or FSDP2 with make_private.",
        )


@torch.no_grad()
def _add(parts: Sequence[tuple[Any, Any]]) -> None:
    """Add reduced gradients to p.grad, as autograd does, once all of them are there."""
    for shard, part in parts:
        if shard.grad is None:
            shard.grad = part.to(getattr(shard, "grad_dtype", None) or part.dtype)
        else:
            shard.grad.add_(part)
