"""The guard on p.grad: while a quantity clips, only what fxgrad delivered is added to it.

    deliver       stamp each gradient with a version number of its own, and note it for the parameter
    arrive        a hook on the parameter compares what arrives with the note
    refuse        anything else raises UnclippedGrad; every p.grad of this backward is put back

The engine adds gradients in place, so a sum with a gradient from elsewhere may lie in the very tensor that was
delivered, with its identity and its memory. Its version tells: the engine counts it up. A version that is drawn anew
for each delivery also tells a delivered tensor from a later one that lies where it lay.

A parameter has one hook however many transformed models guard it, and it stands behind the user's hooks.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.modules.module as global_hooks
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxgrad.errors import FxgradError, OptionError, UnclippedGrad
from fxgrad.host.autograd import autograd_engine, current_task
from fxgrad.host.tensors import attach_hooks, hooks_of, identity, is_view, set_versions, version
from fxgrad.quantities import OUTSIDE, Outside, Quantity
from fxgrad.runtime.autograd_graph import (
    DELIVERED,
    accumulates,
    deliveries_to,
    depends_on_parameters_alone,
    is_nested,
    ops_using,
    roots_of_backward,
)

_STEP = 1 << 8  # between two stamps: more than the engine counts up in one backward
_FIRST, _LAST = 1 << 20, 1 << 31  # no tensor that was merely computed has a version as high; versions have 32 bits
_NOTHING = -1

P = ParamSpec("P")
T = TypeVar("T")


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
        self.guards: list[Guard] = []
        self.handle: Any = None
        self.key = _NOTHING  # of the hook among those of the parameter

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # a quantity that leaves nothing for p.grad
            return None
        delivered = identity(grad) == self.cdata and version(grad) == self.version
        if not delivered:
            _refuse(self)
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
            self.handle = _register(parameter, self)
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
        """Whether p.grad is what the engine made of the delivery, at the end of the backward."""
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

    def forget(self) -> None:
        self.cdata = self.version = _NOTHING
        self.before = self.kept = self.copies = None
        self.tasks, self.arrived = (), False


class Guard:
    """Guards a model's parameters, as long as its transformed view lives or until `release`."""

    def __init__(self, outside: Outside = "error", kind: str = "the model", entrances: Sequence[str] = ()) -> None:
        self.outside, self.kind, self.entrances = outside, kind, tuple(entrances)
        self.watched: dict[int, tuple[Tensor, str, Slot]] = {}  # by id(parameter)
        self.ids: list[int] = []
        self.modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.view: weakref.ref[nn.Module] | None = None  # what users assign to
        self.delivering: Any = None  # the autograd node of the last delivery
        self.proved: tuple[int, bool] | None = None  # outside="allow": a backward call, and whether it may

    def watch(self, parameters: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
        """Guard these parameters and no others; in every step, so it is quick where they are the same."""
        ids = [id(parameter) for parameter in parameters.values()]
        if ids == self.ids:
            for parameter, _, slot in self.watched.values():
                if identity(parameter) != slot.of or not hooks_of(parameter):
                    slot.stay(parameter)
            return
        for key in self.watched.keys() - set(ids):
            if sys.getrefcount(self.watched[key][0]) <= 2:  # `functional_call` puts others in its place for a call
                self._leave(key)
        for name, parameter in parameters.items():
            self.join(name, parameter)
        self.ids = ids
        if model is not None:
            self.modules = weakref.WeakKeyDictionary({part: name for name, part in model.named_modules()})
            view = None if self.view is None else self.view()
            if view is not None:
                self.modules[view] = ""
        _GUARDS.add(self)
        _listen()

    def join(self, name: str, parameter: Tensor) -> None:
        """Guard one more parameter."""
        if id(parameter) in self.watched or not _can_have_grad(parameter):
            return
        slot = _slot_of(parameter)
        if slot is None:
            slot = Slot(parameter)
            slot.stand_last(parameter)
        slot.guards.append(self)
        self.watched[id(parameter)] = parameter, name, slot

    def _leave(self, key: int) -> None:
        _, _, slot = self.watched.pop(key)
        slot.guards.remove(self)
        if not slot.guards:
            slot.handle.remove()
            slot.forget()

    def release(self) -> None:
        """Guard nothing any more, until the next call of the transformed model."""
        for key in list(self.watched):
            self._leave(key)
        self.ids = []
        _GUARDS.discard(self)

    def deliver(self, parameters: Mapping[str, Tensor], grads: Mapping[str, Tensor], task: int, node: Any) -> None:
        """Note the gradients that are on their way to parameters, by name, from an autograd node."""
        self.delivering = node
        tasks = task, current_task()
        stamp = STAMPS.mark(tuple(grads.values()))
        for name, grad in grads.items():
            parameter = parameters[name]
            known = self.watched.get(id(parameter))
            slot = _slot_of(parameter) if known is None else known[2]
            if slot is None:  # released between forward and backward, and no other guards it
                continue
            slot.expect(parameter, grad, stamp, tasks)

    def arrived(self, parameter: Tensor) -> bool:
        """Whether p.grad has what was delivered, and is guarded; ``backward(inputs=..)`` leaves some out."""
        known = self.watched.get(id(parameter))
        return known is not None and known[2].arrived

    def check_held(self, task: int, averaged: bool) -> None:
        """Raise where p.grad was changed behind the comparison, by hooks of the engine's own nodes or after them.

        ``averaged``: the forward ran in DistributedDataParallel, which may put p.grad into its buckets.
        """
        if self.outside != "error":
            return
        for parameter, name, slot in self.watched.values():
            # The task of another: a backward that raised, of a parameter that was replaced since.
            if slot.arrived and task in slot.tasks and not slot.holds(parameter, averaged):
                raise UnclippedGrad(
                    f"p.grad of parameter '{name}' was changed while it was delivered, by a hook: of "
                    "register_post_accumulate_grad_hook, of its AccumulateGrad node, or registered meanwhile; or by a "
                    "callback at the end of the backward",
                    advice="Change p.grad after backward() has returned, or remove the hook.",
                )

    def ended(self) -> None:
        """The backward call is over: nothing has to be put back."""
        self.delivering = None
        for _, _, slot in self.watched.values():
            slot.forget()

    def put_back(self, task: int | None) -> None:
        """Set every p.grad to what it was before this backward call; None: before all that run now."""
        with torch.no_grad():
            for parameter, _, slot in self.watched.values():
                if not slot.arrived or (task is not None and task not in slot.tasks):
                    continue
                slot.restore()
                parameter.grad = slot.before
                slot.forget()

    def allows(self, parameter: Tensor, task: int) -> bool:
        """Whether a gradient from outside of the model may arrive at a parameter."""
        if self.outside != "allow":
            return self.outside == "unchecked"
        if len(hooks_of(parameter) or ()) > 1:  # what a hook returns is no penalty's
            return False
        if self.proved is None or self.proved[0] != task:
            self.proved = task, self._proves()
        return self.proved[1]

    def _proves(self) -> bool:
        """Whether what this backward brings besides one delivery of ours depends on parameters alone."""
        own, roots = {id(parameter) for parameter, _, _ in self.watched.values()}, roots_of_backward()
        foreign = [node for node in deliveries_to(roots, own) if node is not self.delivering]
        return not foreign and not is_nested() and depends_on_parameters_alone(roots, own)


_GUARDS: weakref.WeakSet[Guard] = weakref.WeakSet()  # those that guard something


def guard_for(quantities: Sequence[Quantity], kind: str = "the model", entrances: Sequence[str] = ()) -> Guard | None:
    """A guard where a quantity needs one."""
    clipping = [quantity for quantity in quantities if quantity.guards_grad]
    if not clipping:
        return None
    outside = getattr(clipping[0], "outside", "error")
    if outside not in OUTSIDE:
        raise OptionError(f"outside has to be 'error', 'allow' or 'unchecked', not {outside!r}")
    return Guard(outside, kind, entrances)


def release(parameters: Iterable[Tensor]) -> None:
    """End every guard on these parameters."""
    for parameter in parameters:
        slot = _slot_of(parameter)
        for guard in list(slot.guards) if slot is not None else []:
            guard.release()


def _slot_of(parameter: Tensor) -> Slot | None:
    hooks: Any = hooks_of(parameter) or {}
    return next((hook for hook in hooks.values() if type(hook) is Slot), None)


def _can_have_grad(parameter: Tensor) -> bool:
    if is_lazy(parameter):
        return False
    has_kind = parameter.is_floating_point() or parameter.is_complex()
    return has_kind and parameter.is_leaf and not parameter.is_inference()


def _register(parameter: Tensor, slot: Slot) -> Any:
    """Register the hook; a frozen parameter takes it too, and keeps it when it is unfrozen."""
    frozen = not parameter.requires_grad
    try:
        return parameter.requires_grad_().register_hook(slot)
    finally:
        if frozen:
            parameter.requires_grad_(False)


# What arrives that was not delivered


def undone(method: Callable[P, T]) -> Callable[P, T]:
    """Let every p.grad be as before the running backward call where the method raises an error of fxgrad's in it."""

    @functools.wraps(method)  # no context manager: three of these run in each step
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except FxgradError:
            put_back()
            raise

    return guarded


def put_back() -> None:
    """Set every guarded p.grad to what it was before the running backward call, and those around it."""
    task = None if is_nested() else current_task()
    for guard in list(_GUARDS):
        guard.put_back(task)


def _refuse(slot: Slot) -> None:
    """Raise, unless every guard of the parameter lets it pass."""
    parameter, name, _ = next(known for known in slot.guards[0].watched.values() if known[2] is slot)
    task = current_task()
    if not accumulates(parameter):
        return  # autograd.grad(loss, parameters) leaves p.grad alone
    if all(guard.allows(parameter, task) for guard in slot.guards):
        if task not in slot.tasks:
            slot.note((task,), parameter.grad)
            autograd_engine.queue_callback(slot.forget)
        return
    error = _error(parameter, name, slot)
    put_back()
    raise error


def _error(parameter: Tensor, name: str, slot: Slot) -> UnclippedGrad:
    guard = next((guard for guard in slot.guards if guard.outside != "unchecked"), slot.guards[0])
    ops = ops_using(roots_of_backward(), parameter)
    outside = next((op for op in ops if op != DELIVERED), None)
    hooks: Any = hooks_of(parameter)
    if outside is None and ops.count(DELIVERED) > 1:
        cause = "two transformed models delivered it in one backward, and their sum is not bounded"
        advice = "Call backward() for each, or transform the model once."
    elif outside is None and DELIVERED in ops and len(hooks) > 1:
        cause = "a hook on it (register_hook) changed what fxgrad delivered"
        advice = "Let the hook return None and leave its argument as it is, or remove it."
    elif outside is None and DELIVERED in ops:
        cause = "what fxgrad delivered was changed on its way, or came from a quantity that does not clip"
        advice = f"Use one transformed view of {guard.kind} in a backward."
    else:
        kind = guard.kind.removeprefix("the ")
        cause = f"it was used outside of the transformed {kind}" + (f", by {outside}" if outside else "")
        entrances = ", ".join(f"{entrance}()" for entrance in ("forward", *guard.entrances))
        advice = (
            f"Only what runs in {entrances} of the object that fxgrad.transform returned is clipped: not a submodule, "
            "another method (methods= adds it), the original model, or the parameter itself. For penalties: "
            'ClippedGrad(.., outside="allow"). fxgrad.release(model) ends this guard.'
        )
    return UnclippedGrad(f"a gradient that is not clipped arrived at parameter '{name}': {cause}", advice=advice)


# Parameters that a model gets between two calls


def _listen() -> None:
    """Let PyTorch say when a module gets a parameter or a submodule, from the first guard on."""
    if not _LISTENING:
        _LISTENING.append(global_hooks.register_module_parameter_registration_hook(_registered))
        _LISTENING.append(global_hooks.register_module_module_registration_hook(_added))


_LISTENING: list[Any] = []


def _registered(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """``load_state_dict(assign=True)`` and assigned parameters: guarded before the next call."""
    if parameter is None:
        return
    for guard in list(_GUARDS):
        prefix = guard.modules.get(module)
        if prefix is not None:
            guard.join(f"{prefix}.{name}".lstrip("."), parameter)


def _added(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if submodule is None:
        return
    for guard in list(_GUARDS):
        prefix = guard.modules.get(module)
        if prefix is None:
            continue
        for path, part in submodule.named_modules(prefix=f"{prefix}.{name}".lstrip(".")):
            guard.modules[part] = path
        for path, parameter in submodule.named_parameters(prefix=f"{prefix}.{name}".lstrip(".")):
            guard.join(path, parameter)
