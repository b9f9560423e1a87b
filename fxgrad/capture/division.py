"""How the processes have divided a model, as a call and a backward ask of it.

    call        `free`, then `whole` around the model's call, then `outputs`
    backward    `gather` and `begin` before anything runs, `reduce` at its end

`fxgrad.capture.sharded.Units` is FSDP2's, `fxgrad.capture.parallel.Layers` that of tensor parallelism,
`fxgrad.capture.sharded_layers.ShardedLayers` both, and `fxgrad.capture.simple_fsdp.Properties` SimpleFSDP's. What is
not overridden has nothing to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, fx, nn

from fxgrad.capture.options import Options
from fxgrad.costs.machines import Machine
from fxgrad.errors import OptionError, UnclippedGrad
from fxgrad.host.tensors import hooks_of, post_accumulate_hooks
from fxgrad.runtime.deliveries import Asked
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.guard import Guard
from fxgrad.runtime.slot import Slot, slot_of


class Division:
    """The division of one model over processes."""

    machine: Machine | None = None  # whose speeds decide, where several processes have to decide alike
    one_program = False  # whether graphs of several processes meet in collectives, and have to be the same
    adding = -1  # the last backward call that is to add to p.grad
    settled = True  # whether `settle` knew all that a graph has to know

    def settle(self, options: Options, policy: str) -> Options:
        """Return the options with which graphs compute what the processes can put together.

        ``options``: with the user's quantities. ``policy``: what a backward does while results are still set.
        """
        raise NotImplementedError

    def outdated(self) -> bool:
        """Return whether the model was divided further since."""
        return False

    # a call

    def free(self) -> None:
        """Free what an earlier call has left whole."""

    def whole(self, args: Any, kwargs: Any) -> AbstractContextManager[tuple[Any, Any]]:
        """Let the model be an ordinary one for a call; yields the call's arguments."""
        raise NotImplementedError

    def outputs(self, outputs: Any) -> Any:
        """Return what the model returns, cast as the division says."""
        return outputs

    def enter(self, forward: Forward) -> None:
        """Let a forward know what its backward has to ask."""
        forward.units = self

    def in_graph(self) -> tuple[int, ...]:
        """Return what the graph of the running call gathers."""
        return ()

    def check_graph(self, gm: fx.GraphModule) -> None:
        """Raise where the processes' graphs have to be equal, and are not."""

    def without_graph(self) -> None:
        """Gather what a graph would gather: a batch without samples runs the model as it is."""

    def check(self, asked: Asked, parameters: Mapping[str, Tensor]) -> None:
        """Refuse a result that has no place on a divided parameter."""

    def check_averages(self) -> None:
        """Raise unless p.grad will be the average over all processes."""
        raise NotImplementedError

    # a backward

    def gather(self, weights: Any, gathered: Any) -> None:
        """Gather what was freed between a forward and its backward."""

    def begin(self, forward: Forward, guarded: bool) -> None:
        """Refuse what the guards of the user's parameters will not see arrive: others stand in their places."""
        if forward.asked is None or forward.asked.adds_to_grad:
            self._check_clipped(forward, guarded)
            _EVERY.add(self)
            self.adding = forward.task()

    def _check_clipped(self, forward: Forward, guarded: bool) -> None:
        """Raise where another view of the model clips, and this one does not, or both add in one backward."""
        others = [one for one in _EVERY if one is not self and one.adding == forward.task()]
        beside = {key for other in others for key in other.replaced()}
        for name, parameter in self.shards(forward.parameters).items():
            slot = slot_of(parameter) if id(parameter) in self.replaced() else None
            strict = slot is not None and any(guard.outside != "unchecked" for guard in slot.guards)
            if strict and (not guarded or id(parameter) in beside):
                cause = (
                    "two transformed models deliver it in one backward, and their sum is not bounded"
                    if guarded
                    else "another transformed view of the model clips, and this one does not"
                )
                raise UnclippedGrad(
                    f"a gradient that is not clipped would arrive at parameter '{name}': {cause}",
                    advice="Use one transformed view of the model in a backward. fxgrad.release(view) ends its guard.",
                )

    def reduce(self, task: int, adds: bool, parameters: Mapping[str, Tensor], rows: int) -> None:
        """Put what a backward over this process's rows has left on the user's parameters."""
        raise NotImplementedError

    # parameters: the user's, and those that stand in their places in a call

    def known_as(self, view: nn.Module) -> None:
        """Let methods of a divided model work on the transformed one, too."""

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of both kinds; the model holds either the ones or the others."""
        raise NotImplementedError

    def shards(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the user's parameter in place of each that stands for it in a call."""
        raise NotImplementedError

    def replaced(self) -> Collection[int]:
        """Return the id() of each of the user's parameters that gets its gradient from another, without autograd."""
        return ()

    def all_shards(self) -> list[Tensor]:
        """Return every divided parameter of the user's, in an order that all processes share."""
        raise NotImplementedError

    def guard(self, guard: Guard, parameters: Mapping[str, Tensor]) -> None:
        """Guard the user's parameters, too."""
        raise NotImplementedError


def check_unhooked(name: str, parameter: Tensor) -> None:
    """Refuse a user's hook on a parameter that gets its gradient without autograd."""
    hooks = [*(hooks_of(parameter) or {}).values(), *(post_accumulate_hooks(parameter) or {}).values()]
    if any(type(hook) is not Slot for hook in hooks):
        raise OptionError(
            f"parameter '{name}' is a DTensor with a hook, which would see no gradient",
            advice="Remove the hook, and read p.grad behind backward().",
        )


_EVERY: weakref.WeakSet[Division] = weakref.WeakSet()
"""Those that have added to p.grad."""
