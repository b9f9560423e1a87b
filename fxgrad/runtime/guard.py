"""The guard on p.grad: while a quantity clips, only what fxgrad delivered is added to it.

    deliver       stamp each gradient with a version number of its own, and note it for the parameter
    arrive        a hook on the parameter compares what arrives with the note (slot.py)
    refuse        anything else raises UnclippedGrad; every p.grad of this backward is put back

A guard lives as long as the transformed model. Several may guard one parameter.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.modules.module as global_hooks
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxgrad.errors import FxgradError, UnclippedGrad, refuse_choice
from fxgrad.host.autograd import autograd_engine, current_task
from fxgrad.host.dynamo import as_it_is
from fxgrad.host.tensors import hooks_of, identity
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
from fxgrad.runtime.processes import tell
from fxgrad.runtime.slot import (
    STAMPS,
    Slot,
    are_alone,
    expect_all,
    forget_all,
    hold_all,
    slot_of,
    stand_where_they_were,
)

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Withdraws")


class Watched(NamedTuple):
    """A guarded parameter, its name in the model, and its hook."""

    parameter: Tensor
    name: str
    slot: Slot


class Columns(NamedTuple):
    """Guarded parameters and their slots, as bulk operations take them."""

    names: tuple[str, ...]
    parameters: list[Tensor]
    slots: list[Slot]


class Guard:
    """Guards a model's parameters, as long as its transformed view lives or until `release`."""

    def __init__(self, outside: Outside = "error", kind: str = "the model", entrances: Sequence[str] = ()) -> None:
        self.outside, self.kind, self.entrances = outside, kind, tuple(entrances)
        self.watched: dict[int, Watched] = {}  # by id(parameter)
        self.ids: list[int] = []
        self.all: Columns | None = None  # those that are watched
        self.route: Columns | None = None  # those that the last delivery went to
        self.rest: list[Watched] = []  # the others
        self.modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.view: weakref.ref[nn.Module] | None = None  # what users assign to
        self.delivering: Any = None  # the autograd node of the last delivery
        self.proved: tuple[int, bool] | None = None  # outside="allow": a backward call, and whether it may

    def watch(self, parameters: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
        """Guard these parameters and no others; in every step, so it is quick where they are the same."""
        ids = [*map(id, parameters.values())]
        if ids == self.ids:
            _, tensors, slots = self.all or self._columns()
            if not stand_where_they_were(slots, tensors):
                for parameter, _, slot in self.watched.values():
                    if identity(parameter) != slot.of or not hooks_of(parameter):
                        slot.stay(parameter)
            return
        self._changed()
        for key in self.watched.keys() - set(ids):
            if (
                sys.getrefcount(self.watched[key].parameter) <= 2
            ):  # `functional_call` puts others in its place for a call
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
        slot = slot_of(parameter)
        if slot is None:
            slot = Slot(parameter)
            slot.stand_last(parameter)
        slot.guards.append(self)
        self.watched[id(parameter)] = Watched(parameter, name, slot)
        self._changed()

    def _leave(self, key: int) -> None:
        _, _, slot = self.watched.pop(key)
        self._changed()
        slot.guards.remove(self)
        if not slot.guards:
            slot.handle.remove()
            slot.forget()

    def _changed(self) -> None:
        """Forget the columns of what was watched before: they keep parameters alive."""
        self.all = self.route = None
        self.rest = []

    def _columns(self) -> Columns:
        """Return all that is watched, and keep it in `all`."""
        watched = self.watched.values()
        self.all = Columns((), [one.parameter for one in watched], [one.slot for one in watched])
        return self.all

    def _route_to(self, names: tuple[str, ...], parameters: list[Tensor]) -> Columns | None:
        """Return these parameters with their slots, None unless all are watched; most backwards go to the same."""
        route = self.route
        if route is None or names != route.names or not all(map(is_, parameters, route.parameters)):
            known = [self.watched.get(id(parameter)) for parameter in parameters]
            slots = [one.slot for one in known if one is not None]
            route = self.route = Columns(names, parameters, slots) if len(slots) == len(names) else None
            reached = {*map(id, slots)}
            self.rest = [one for one in self.watched.values() if id(one.slot) not in reached]
        return route

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
        tensors = [*grads.values()]
        stamp = STAMPS.mark(tensors)
        route = self._route_to(tuple(grads), [*map(parameters.__getitem__, grads)])
        if route is not None:
            expect_all(route.slots, route.parameters, tensors, stamp, tasks)
            return
        for name, grad in grads.items():
            parameter = parameters[name]
            known = self.watched.get(id(parameter))
            slot = slot_of(parameter) if known is None else known.slot
            if slot is None:  # released between forward and backward, and no other guards it
                continue
            slot.expect(parameter, grad, stamp, tasks)

    def is_alone(self, names: tuple[str, ...], parameters: list[Tensor]) -> bool:
        """Return whether every parameter is guarded, and has the guards' hook and no other."""
        route = self._route_to(names, parameters)
        return route is not None and are_alone(route.slots, route.parameters)

    def arrived(self, parameter: Tensor) -> bool:
        """Return whether p.grad has what was delivered, and is guarded; ``backward(inputs=..)`` leaves some out."""
        known = self.watched.get(id(parameter))
        return known is not None and known.slot.arrived

    def check_held(self, task: int, averaged: bool) -> None:
        """Raise where p.grad was changed behind the comparison, by hooks of the engine's own nodes or after them.

        ``averaged``: the forward ran in DistributedDataParallel, which may put p.grad into its buckets.
        """
        if self.outside != "error":
            return
        route = self.route
        held = route is not None and hold_all(route.slots, route.parameters)
        for parameter, name, slot in self.rest if held else self.watched.values():
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
        forget_all((self.all or self._columns()).slots)

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
        """Return whether a gradient from outside of the model may arrive at a parameter."""
        if self.outside != "allow":
            return self.outside == "unchecked"
        if len(hooks_of(parameter) or ()) > 1:  # what a hook returns is no penalty's
            return False
        if self.proved is None or self.proved[0] != task:
            self.proved = task, self._proves()
        return self.proved[1]

    def refuse(self, slot: Slot) -> None:
        """Raise for what arrived at a parameter and was not delivered, unless all of its guards let it pass."""
        parameter, name, _ = next(watched for watched in self.watched.values() if watched.slot is slot)
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

    def _proves(self) -> bool:
        """Return whether what this backward brings besides one delivery of ours depends on parameters alone."""
        parameters, roots = self.watched.keys(), roots_of_backward()
        foreign = [node for node in deliveries_to(roots, parameters) if node is not self.delivering]
        return not foreign and not is_nested() and depends_on_parameters_alone(roots, parameters)


_GUARDS: weakref.WeakSet[Guard] = weakref.WeakSet()  # those that guard something


def guard_for(quantities: Sequence[Quantity], kind: str = "the model", entrances: Sequence[str] = ()) -> Guard | None:
    """Return a guard where a quantity needs one."""
    clipping = [quantity for quantity in quantities if quantity.guards_grad]
    if not clipping:
        return None
    outside = getattr(clipping[0], "outside", "error")
    if outside not in OUTSIDE:
        refuse_choice("outside", outside, OUTSIDE)
    return Guard(outside, kind, entrances)


def release(parameters: Iterable[Tensor]) -> None:
    """End every guard on these parameters."""
    for parameter in parameters:
        slot = slot_of(parameter)
        for guard in list(slot.guards) if slot is not None else []:
            guard.release()


def _can_have_grad(parameter: Tensor) -> bool:
    if is_lazy(parameter):
        return False
    has_kind = parameter.is_floating_point() or parameter.is_complex()
    return has_kind and parameter.is_leaf and not parameter.is_inference()


# What arrives that was not delivered


class Withdraws(Protocol):
    """Keeps results of backward calls."""

    def withdraw(self) -> None:
        """Let results be as before the running backward call."""


def undone(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let p.grad and results be as before the running backward call where the method raises an fxgrad error in it."""

    @as_it_is
    @functools.wraps(method)  # no context manager: three of these run in each step
    def guarded(store: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(store, *args, **kwargs)
        except FxgradError as error:
            put_back()
            store.withdraw()
            tell(error)
            raise

    return guarded


def put_back() -> None:
    """Set every guarded p.grad to what it was before the running backward call, and those around it."""
    task = None if is_nested() else current_task()
    for guard in list(_GUARDS):
        guard.put_back(task)


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


@functools.lru_cache(maxsize=1)
def _listen() -> None:
    """Let PyTorch say when a module gets a parameter or a submodule, from the first guard on."""
    global_hooks.register_module_parameter_registration_hook(_registered)
    global_hooks.register_module_module_registration_hook(_added)


def _guards_of(module: nn.Module, name: str) -> Iterator[tuple[Guard, str]]:
    """Yield the guards of a module, each with the path of what has this name in it."""
    for guard in list(_GUARDS):
        prefix = guard.modules.get(module)
        if prefix is not None:
            yield guard, f"{prefix}.{name}".lstrip(".")


def _registered(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """``load_state_dict(assign=True)`` and assigned parameters: guarded before the next call.

    Dynamo traces this function where a module gets parts, as in ``self.layers[:2]``: its graph must not
    depend on the guards of a process. Parts that a forward assigns for good get here once the graph has run.
    """
    if parameter is None or torch.compiler.is_dynamo_compiling():
        return
    for guard, path in _guards_of(module, name):
        guard.join(path, parameter)


def _added(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Guard the parameters of an assigned module; see `_registered`."""
    if submodule is None or torch.compiler.is_dynamo_compiling():
        return
    for guard, prefix in _guards_of(module, name):
        guard.modules.update({part: path for path, part in submodule.named_modules(prefix=prefix)})
        for path, parameter in submodule.named_parameters(prefix=prefix):
            guard.join(path, parameter)
