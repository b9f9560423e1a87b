"""The hook on one guarded parameter, which knows the gradient that may arrive by its version.

The engine adds gradients in place, so a sum with a gradient from elsewhere may lie in the very tensor that was
delivered, with its identity and its memory. Its version tells: the engine counts it up. A version that is drawn anew
for each delivery also tells a delivered tensor from a later one that lies where it lay.

A parameter has one hook however many transformed models guard it, and it stands behind the user's hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, contains, is_
from typing import Any, Protocol

import torch
from torch import Tensor

from fxgrad.host.dynamo import as_it_is
from fxgrad.host.tensors import attach_hooks, hooks_of, identity, is_view, set_versions, version
from fxgrad.quantities import Outside

_STEP = 1 << 8  # between two stamps: more than the engine counts up in one backward
_FIRST, _LAST = 1 << 20, 1 << 31  # no tensor that was merely computed has a version as high; versions have 32 bits
_NOTHING = -1

# For `map`, which adds no Python frame: these are read of each parameter in each step.
grad_of, _stride = attrgetter("grad"), Tensor.stride
_of, _key, _before, _version, _tasks = map(attrgetter, ("of", "key", "before", "version", "tasks"))


class _Stamps:
    """Version numbers, each used once."""

    def __init__(self) -> None:
        self.last = _FIRST

    def new(self) -> int:
        self.last = self.last + _STEP if self.last < _LAST else _FIRST
        return self.last

    def mark(self, tensors: Sequence[Tensor]) -> int:
        """Give tensors one new version."""
        stamp = self.new()
        set_versions(tuple(tensors), (stamp,) * len(tensors))
        return stamp

    def renew(self, tensors: Iterable[Tensor]) -> None:
        """Mark those that changed since they were marked; others may follow the marks, too."""
        changed = [tensor for tensor in tensors if version(tensor) < _FIRST or version(tensor) % _STEP]
        if changed:
            self.mark(changed)


STAMPS = _Stamps()


class Owner(Protocol):
    """A guard, as the slots of its parameters know it."""

    outside: Outside
    kind: str
    entrances: tuple[str, ...]

    def allows(self, parameter: Tensor, task: int) -> bool: ...

    def refuse(self, slot: Slot) -> None: ...

    def release(self) -> None: ...


class Slot:
    """The hook on one parameter: the gradient that may arrive next, and p.grad as it was before."""

    __slots__ = tuple("arrived before cdata copies count guards handle kept kept_count key of tasks version".split())
    __torch_unserializable__ = True  # PyTorch: copies of the parameter go without this hook, and without a warning

    def __init__(self, parameter: Tensor) -> None:
        self.of = identity(parameter)  # the tensor that has the hook
        self.cdata = self.version = _NOTHING  # the gradient that may arrive
        self.tasks: tuple[int, ...] = ()  # the backward call that is noted here, and the one it runs in
        self.arrived = False  # whether p.grad has changed in it
        # The parameter, where the engine would copy what it is given instead of keeping it: the copy is then made here,
        # and its version is known.
        self.copies: Tensor | None = None
        self.before: Tensor | None = None  # p.grad before that backward, which the engine adds to in place
        self.count = 0  # its version
        self.kept: Tensor | None = None  # its values, and its version then
        self.kept_count = 0
        self.guards: list[Owner] = []
        self.handle: Any = None
        self.key = _NOTHING  # of the hook among those of the parameter

    @as_it_is
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # a quantity that leaves nothing for p.grad
            return None
        delivered = identity(grad) == self.cdata and version(grad) == self.version
        if not delivered:
            self.guards[0].refuse(self)
        self.arrived = True
        if self.before is not None and self.kept is None:
            self.kept, self.kept_count = self.before.clone(), version(self.before)
        if self.copies is None or self.before is not None or not delivered:
            return None
        made = torch.empty_like(self.copies, dtype=grad.dtype).copy_(grad)
        self.version = STAMPS.mark([made])
        return made

    def stay(self, parameter: Tensor) -> None:
        """Come back where the hook was taken away; `torch.utils.swap_tensors` leaves it behind with the old tensor."""
        if identity(parameter) != self.of:
            attach_hooks(parameter)
            self.of = identity(parameter)
        if not hooks_of(parameter):
            self.stand_last(parameter)

    def stand_last(self, parameter: Tensor) -> None:
        """Run behind every hook of the user's: what they return arrives here."""
        hooks: Any = hooks_of(parameter)
        if not hooks or self.key not in hooks:
            self.handle = self._register(parameter)
            self.key = self.handle.id
        elif next(reversed(hooks)) != self.key:
            # PyTorch calls them in the order of insertion, whatever `move_to_end` says.
            hooks[self.key] = hooks.pop(self.key)

    def expect(self, parameter: Tensor, grad: Tensor, stamp: int, tasks: tuple[int, ...]) -> None:
        """Note a gradient that is on its way, and p.grad as it is before."""
        hooks: Any = hooks_of(parameter)
        alone = bool(hooks) and len(hooks) == 1 and self.key in hooks
        if not alone:
            self.stand_last(parameter)
            alone = len(hooks_of(parameter) or ()) == 1
        self.note(tasks, parameter.grad)
        self.cdata, self.version = identity(grad), stamp
        # Other hooks may keep it, and the layout has to be p's.
        self.copies = None if alone and grad.stride() == parameter.stride() else parameter

    def holds(self, parameter: Tensor, averaged: bool) -> bool:
        """Return whether p.grad is what the engine made of the delivery, at the end of the backward."""
        grad: Any = parameter.grad
        hooks: Any = hooks_of(parameter)
        if self.version == _NOTHING or grad is None:
            return True  # None: sharding took it
        before = self.before
        if hooks and next(reversed(hooks)) == self.key:  # no hook was registered meanwhile
            made = self.version if before is None else self.count + 1
            if version(grad) == made and (before is None or grad is before):
                return True
        # Of DistributedDataParallel's buckets, or of a tensor whose version counts all of its views.
        return bool(is_view(grad)) and (averaged or grad is before)

    def note(self, tasks: tuple[int, ...], before: Tensor | None) -> None:
        """Keep p.grad as it was when this backward call began."""
        if tasks != self.tasks:
            self.tasks, self.before, self.kept, self.arrived = tasks, before, None, False
            self.count = 0 if before is None else version(before)

    def restore(self) -> None:
        """Undo what the engine added; the version goes back, too, unless other tensors share it."""
        if self.before is None or self.kept is None:
            return
        self.before.copy_(self.kept)
        if not is_view(self.before):
            set_versions((self.before,), (self.kept_count,))

    @as_it_is
    def forget(self) -> None:
        self.cdata = self.version = _NOTHING
        self.before = self.kept = self.copies = None
        self.tasks, self.arrived = (), False

    def _register(self, parameter: Tensor) -> Any:
        """Register the hook; a frozen parameter takes it too, and keeps it when it is unfrozen."""
        frozen = not parameter.requires_grad
        try:
            return parameter.requires_grad_().register_hook(self)
        finally:
            if frozen:
                parameter.requires_grad_(False)


def slot_of(parameter: Tensor) -> Slot | None:
    """Return the guards' hook on a parameter; None where there is none."""
    hooks: Any = hooks_of(parameter) or {}
    return next((hook for hook in hooks.values() if type(hook) is Slot), None)


# What each step does with all slots of a model at once


def stand_where_they_were(slots: Sequence[Slot], parameters: Sequence[Tensor]) -> bool:
    """Return whether `Slot.stay` has nothing to do for any parameter."""
    return all(map(hooks_of, parameters)) and [*map(identity, parameters)] == [*map(_of, slots)]


def are_alone(slots: Sequence[Slot], parameters: Sequence[Tensor]) -> bool:
    """Return whether every parameter has the guards' hook and no other."""
    hooks: Any = [*map(hooks_of, parameters)]
    return all(hooks) and sum(map(len, hooks)) == len(hooks) and all(map(contains, hooks, map(_key, slots)))


def expect_all(
    slots: Sequence[Slot], parameters: Sequence[Tensor], grads: Sequence[Tensor], stamp: int, tasks: tuple[int, ...]
) -> None:
    """Call `Slot.expect` for each; where nothing was there before, the notes are three attributes."""
    new = not any(map(_tasks, slots)) and all(map(is_, map(grad_of, parameters), repeat(None)))
    if not (new and are_alone(slots, parameters) and [*map(_stride, grads)] == [*map(_stride, parameters)]):
        for slot, parameter, grad in zip(slots, parameters, grads, strict=True):
            slot.expect(parameter, grad, stamp, tasks)
        return
    for slot, cdata in zip(slots, map(identity, grads), strict=True):
        slot.cdata, slot.version, slot.tasks = cdata, stamp, tasks


def hold_all(slots: Sequence[Slot], parameters: Sequence[Tensor]) -> bool:
    """Return whether p.grad of every parameter is new, what was delivered, and behind no other hook.

    False says nothing: `Slot.holds` then answers for each.
    """
    grads: Any = [*map(grad_of, parameters)]
    if any(map(is_, grads, repeat(None))) or [*map(version, grads)] != [*map(_version, slots)]:
        return False
    return all(map(is_, map(_before, slots), repeat(None))) and are_alone(slots, parameters)


def forget_all(slots: Iterable[Slot]) -> None:
    """Call `Slot.forget` for each that has notes."""
    for slot in slots:
        if slot.tasks or slot.arrived or slot.version != _NOTHING:
            slot.cdata = slot.version = _NOTHING
            slot.before = slot.kept = slot.copies = None
            slot.tasks, slot.arrived = (), False
