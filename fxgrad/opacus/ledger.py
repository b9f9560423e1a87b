"""The ledger of a private model: it records each delivery, and the step compares p.grad with it before any change.

    backward begins    p.grad is empty, or as the last delivery left it
    backward ends      every trainable parameter of the model got its part: one more delivery
    step               the optimizer's parameters are the model's trainable ones, and each has what was delivered

The same holds for p.grad_sample, but there the optimizer may omit parameters: Opacus then clips over those it has.
Where the backward clips, the ledger also records to which C.

Where FSDP2 divided the model, all this is of the shards, which get what FSDP2 reduces at the end of the backward. The
whole parameters must have no p.grad as a backward begins: FSDP2 would add it to the next sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxgrad.engine import Engine
from fxgrad.errors import UnaccountedGrad
from fxgrad.host.autograd import autograd_engine
from fxgrad.host.dynamo import as_it_is
from fxgrad.host.fsdp import local_part
from fxgrad.host.tensors import assert_on_device, identity, post_accumulate_hooks, version
from fxgrad.quantities import ClippedGrad
from fxgrad.quantities.clipping import Clipping
from fxgrad.runtime.autograd_graph import accumulates
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.slot import STAMPS

CLEAR = "Call optimizer.zero_grad(), and run forward and backward of the private model again."
State = tuple[tuple[Any, ...], ...]  # `state_of` each tensor at a place


class ClippedPart(NamedTuple):
    """What a backward that clips has delivered."""

    bounds: tuple[float, ...]  # C of each group, as that backward began
    clipping: Clipping


class Ledger:
    """The record of the backward calls of a private model between two steps."""

    def __init__(self, engine: Engine, quantity: ClippedGrad | None) -> None:
        self.engine, self.quantity = engine, quantity  # a quantity if the backward clips
        self.place = "grad_sample" if quantity is None else "grad"
        self.shards = engine.units is not None
        self.deliveries = 0  # since p.grad was last empty
        self.parts: list[ClippedPart] = []  # of these deliveries
        self.bounds: tuple[float, ...] = ()  # of the backward call in progress
        self.parameters: dict[int, tuple[str, Tensor]] = {}  # the parameters of the last delivery, by `id()`
        self.states: dict[int, State] = {}  # after the last delivery or clearing
        self.running: int | None = None  # the backward call in progress
        self.trouble = ""
        engine.store.observers.add(self)

    # called by the model's backward

    def began(self, forward: Forward) -> None:
        """Compare p.grad with the recorded states as a backward begins."""
        if self.place == "grad" and not any(map(accumulates, forward.parameters.values())):  # autograd.grad
            return
        parameters = self._stepped(forward)
        for each in (forward.parameters, parameters):
            self._check_hooks(each)
        if self.shards and any(map(self.tensors, forward.parameters.values())):
            self.trouble = self.trouble or "an earlier backward left gradients that FSDP2 has not reduced"
        states = {name: self.state(parameter) for name, parameter in parameters.items()}
        present = {name: state for name, state in states.items() if state or self.deliveries}
        changed = [name for name, state in present.items() if state != self.states.get(id(parameters[name]), ())]
        values = (tensor for parameter in parameters.values() for tensor in self.tensors(parameter))
        if changed and any(map(_is_nonzero, values)):  # zero_grad(set_to_none=False) leaves zeros
            self.trouble = self.trouble or (
                f"{self.place} of '{changed[0]}' held something else than fxgrad delivered when a backward began"
            )
        elif changed or not any(states.values()):
            self._forget()
        if self.quantity is not None:
            self.bounds = numbers_of(self.quantity.max_grad_norm)
        self.running = forward.task()

    def _stepped(self, forward: Forward) -> Mapping[str, Tensor]:
        """Return the parameters that the optimizer steps, by name: the shards of a divided model."""
        return forward.parameters if forward.units is None else forward.units.all_in_shards(forward.parameters)

    def _check_hooks(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise for a post-accumulate hook; its change of p.grad would look like a delivery."""
        hooked = [name for name, p in parameters.items() if post_accumulate_hooks(p)]
        if hooked and self.place == "grad":
            raise UnaccountedGrad(
                f"'{hooked[0]}' has a hook (register_post_accumulate_grad_hook), which may change p.grad after the "
                "clipping",
                advice="Remove it. A hook of register_hook may look at the clipped gradient.",
            )

    def ended(self, forward: Forward) -> None:
        """Record a delivery at the very end of the backward, after DistributedDataParallel averaged p.grad."""
        if forward.task() != self.running:
            return
        for name, parameter in () if forward.reduces_at_once() else forward.parameters.items():
            self.trouble = self.trouble or self._trouble_with(name, parameter, forward)
        autograd_engine.queue_callback(partial(self._enter, forward))

    def _trouble_with(self, name: str, parameter: Tensor, forward: Forward) -> str:
        tensors, guard = self.tensors(parameter), self.engine.store.guard
        missed = guard is not None and name in forward.sent and not guard.arrived(parameter)
        if not tensors or (self.place == "grad" and (missed or not parameter.requires_grad)):
            return (
                f"{self.place} of '{name}' did not get its part of the last backward, as with backward(inputs=..), "
                "after fxgrad.release, or where it was frozen between forward and backward"
            )
        if self.place == "grad_sample":
            if forward.met or forward.stored.get((id(parameter), self.place)) != identity(tensors[-1]):
                return f"two transformed models added to grad_sample of '{name}' in one backward"
            if self.deliveries and id(parameter) not in self.parameters:
                return f"'{name}' is trainable in some of the batches of this step, and in others it is not"
        return ""

    @as_it_is
    def _enter(self, forward: Forward) -> None:
        self.running = None
        self.deliveries += 1
        if self.quantity is not None:
            self.parts.append(ClippedPart(self.bounds, self.engine.store.result(self.quantity)))
        stepped = self._stepped(forward)
        if forward.units is not None:
            missed = next((name for name, shard in stepped.items() if not self.tensors(shard)), None)
            cause = forward.units.altered_average()
            if missed is not None or cause:
                self.trouble = self.trouble or (
                    f"FSDP2 has not reduced the gradient of '{missed or next(iter(stepped))}' to the average over all "
                    f"processes{f': {cause}' if cause else ''}"
                )
        self.parameters = {id(parameter): (name, parameter) for name, parameter in stepped.items()}
        self._mark(stepped.values())

    def cleared(self, parameters: Iterable[Tensor]) -> None:
        """Start over after zero_grad: p.grad is zero or None."""
        self._forget()
        self._mark(parameters)

    def _mark(self, parameters: Iterable[Tensor]) -> None:
        marked = list(parameters)
        STAMPS.renew(tensor for parameter in marked for tensor in self.tensors(parameter))
        self.states = {id(parameter): self.state(parameter) for parameter in marked}

    def _forget(self) -> None:
        self.deliveries, self.parameters, self.states, self.running, self.trouble = 0, {}, {}, None, ""
        self.parts = []

    # called by the optimizer

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise unless a step on these parameter groups uses exactly the delivered gradients, all with noise."""
        stepped = {id(parameter): parameter for group in groups for parameter in group["params"]}
        trainable = {key: parameter for key, parameter in stepped.items() if parameter.requires_grad}
        self._check_backward()
        self._check_parameters(stepped, trainable)
        for key, parameter in trainable.items():
            if not _is_unchanged(self.states[key], self.state(parameter)):
                raise UnaccountedGrad(
                    f"{self.place} of '{self.parameters[key][0]}' is not what the last backward of the private model "
                    "left: it was assigned, cleared or changed since, or another backward added to it",
                    advice="Leave it to the optimizer: no GradScaler (bfloat16 needs none), no clip_grad_norm_, no "
                    f"second model. {CLEAR}",
                )

    def _check_backward(self) -> None:
        if self.running is not None:
            raise UnaccountedGrad(
                f"a backward of the private model raised before its end: {self.place} may hold a part of it",
                advice=CLEAR,
            )
        if self.trouble:
            raise UnaccountedGrad(self.trouble, advice=CLEAR)
        if not self.deliveries:
            raise UnaccountedGrad(
                "no backward of the private model since the last step: there is nothing to step with",
                advice="Call the model that make_private returned: not the one that you passed in, not a submodule. "
                "Run forward and backward for an empty batch, too.",
            )

    def _check_parameters(self, stepped: dict[int, Tensor], trainable: dict[int, Tensor]) -> None:
        moved = [p for p in stepped.values() if not p.requires_grad and p.grad is not None and _is_nonzero(p.grad)]
        if moved:
            raise UnaccountedGrad(
                f"a frozen parameter of shape {list(moved[0].shape)} holds p.grad: the step would move it without "
                "noise",
                advice="Set its grad to None when you freeze it, before the forward.",
            )
        units = self.engine.units
        own = self.engine.parameters().values() if units is None else units.all_shards()
        present = {id(parameter) for parameter in own}
        foreign = [p for key, p in trainable.items() if key not in present]
        if foreign:
            raise UnaccountedGrad(
                f"a parameter of the optimizer, of shape {list(foreign[0].shape)}, is not the private model's: it "
                "would move by noise, and the model would not",
                advice="Give the optimizer the model's own parameters, which load_state_dict(assign=True) replaces.",
            )
        unknown = [p for key, p in trainable.items() if key not in self.parameters]
        if unknown:
            raise UnaccountedGrad(
                f"a parameter of the optimizer, of shape {list(unknown[0].shape)}, had no part in the last backward "
                "of the private model: it would move by noise alone",
                advice=f"Unfreeze it before the forward. {CLEAR}",
            )
        missing = [name for key, (name, _) in self.parameters.items() if key not in trainable]
        if missing and self.place == "grad":
            raise UnaccountedGrad(
                f"the clipped norm is over '{missing[0]}', too, which the optimizer does not step",
                advice="Freeze it before the forward with requires_grad_(False), or add it to the optimizer.",
            )

    # the tensors at a parameter

    def tensors(self, parameter: Tensor) -> list[Tensor]:
        value = getattr(parameter, self.place, None)
        return list(value) if isinstance(value, list) else [] if value is None else [value]

    def state(self, parameter: Tensor) -> State:
        return tuple(map(state_of, self.tensors(parameter)))


class Contents:
    """A copy of a tensor; equal to another one of the same numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contents) and self.is_like(other) and bool(self.equals(other))

    __hash__ = None  # type: ignore[assignment]

    def is_like(self, other: Contents) -> bool:
        """Return whether shapes and dtypes are the same."""
        return self.copy.shape == other.copy.shape and self.copy.dtype is other.copy.dtype

    def equals(self, other: Contents) -> Tensor:
        """Return whether the numbers are the same, as a 0-dim tensor."""
        return torch.isclose(self.copy, other.copy, rtol=0, atol=0, equal_nan=True).all()


def state_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what differs after a change of a tensor: its identity and version.

    Of a DTensor also its numbers: ``torch._foreach_mul_`` changes them and no version.
    """
    part = local_part(tensor)
    if part is tensor:
        return identity(tensor), version(tensor)
    return identity(tensor), identity(part), Contents(part)


def _is_unchanged(before: State, now: State) -> bool:
    """Return whether the tensors at a parameter are as they were, without waiting for a device.

    The numbers of a shard on a device are compared there: a difference stops the device before the step moves anything.
    """
    if len(before) != len(now):
        return False
    for one, other in zip(before, now, strict=True):
        contents = one[-1]
        if not isinstance(contents, Contents) or is_on_host(contents.copy):
            if one != other:
                return False
        elif one[:-1] != other[:-1] or not contents.is_like(other[-1]):
            return False
        else:
            assert_on_device(contents.equals(other[-1]), "p.grad of a private model was changed behind its backward")
    return True


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host reads a tensor without waiting."""
    return tensor.device.type == "cpu"


def _is_nonzero(tensor: Tensor) -> bool:
    """Return whether this process's part of a tensor has a number other than zero; no process waits for another."""
    return bool(local_part(tensor).any())


def numbers_of(max_grad_norm: float | Sequence[float] | Tensor) -> tuple[float, ...]:
    """Return C of each group as numbers; one for C of all."""
    if isinstance(max_grad_norm, Tensor):
        return tuple(max_grad_norm.reshape(-1).tolist())
    return tuple(map(float, max_grad_norm)) if isinstance(max_grad_norm, Sequence) else (float(max_grad_norm),)
