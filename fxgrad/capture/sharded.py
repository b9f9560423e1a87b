"""FSDP2: a model that ``fully_shard`` divided into units runs as a whole one, from its call to the end of its backward.

    gather    the outermost hooks' work; then every unit's parameters in turn, in the same order on each process; or a
              compiled graph gathers a unit where it uses it (sharded_gathers.py)
    call      without FSDP2's hooks and classes: the passes see an ordinary model with whole parameters
    reduce    at the end of the backward, FSDP2 averages and shards each unit's p.grad; clipped sums earlier, one unit
              after the other (sharded_sums.py)

Batches of different sizes, and empty ones, meet in the same collectives. Where no graph gathers, the parameters of all
units are whole in a step, as under ``reshard_after_forward=False``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fxgrad.capture.division import Division
from fxgrad.capture.options import Options
from fxgrad.capture.parallel import check_not_parallel
from fxgrad.capture.sharded_gathers import Call
from fxgrad.capture.sharded_hooks import ordinary, unit_of
from fxgrad.capture.sharded_results import LOCAL, Results, move_local, per_process, places_of
from fxgrad.capture.sharded_sums import Sums
from fxgrad.errors import BatchSizeError, OptionError, UnclippedGrad
from fxgrad.host import fsdp
from fxgrad.host.autograd import autograd_engine, current_task
from fxgrad.host.fsdp import State
from fxgrad.host.tensors import version
from fxgrad.runtime.deliveries import Asked
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.guard import Guard
from fxgrad.runtime.processes import collective
from fxgrad.runtime.slot import slot_of

Weights: TypeAlias = tuple[tuple[int, int], ...]
"""The identity and the version of each shard."""


class Units(Division):
    """The units of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.states = _states(model)
        self.roots: list[State] = []
        self.reducing = -1  # the backward call at whose end the gradients are reduced
        self.adds = False  # whether that call adds to p.grad
        self.results = Results((), "error")  # on the shards, of all processes
        self.waits = False  # whether a call has left the parameters whole, for its backward
        self.guarded = False  # whether a guard has watched the whole parameters
        self.before: list[tuple[Tensor | None, int]] | None = None  # p.grad of whole ones, before a running backward
        self.forward: Callable[[], Forward | None] = lambda: None  # the last one, while anything refers to it
        self.sums = Sums(lambda: self.waits and self.forward() is not None)

    def settle(self, options: Options, policy: str) -> Options:
        quantities = self.sums.by_unit(per_process(options.quantities))
        compiled = options.fullgraph and options.backend in ("inductor", "aot_eager")
        self.sums.by_graph = compiled and self.sums.hands_over
        self.results = Results(quantities, policy)
        return replace(options, quantities=quantities)

    @contextlib.contextmanager
    def whole(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Gather all parameters, and let the model be an ordinary one for a call; yields the call's arguments."""
        self._find_roots()
        args, kwargs = fsdp.begin(self.roots, self.model, args, kwargs)
        fsdp.free(self.states)  # what an earlier forward without a backward left whole may be old
        self._drop_failed()
        self.waits = True
        if not self.sums.groups:
            self.sums.groups = fsdp.in_order_of_reduction(self.roots)
        with collective():
            self.sums.gathers.begin_forward(self.states, self.sums.groups, self.sums.by_graph)
        self.sums.in_graph[:] = self.sums.gathers.call.groups
        for shard, whole in fsdp.pairs(self.states):
            whole.requires_grad_(shard.requires_grad)
            move_local(shard, whole)
            self.results.hold(shard, whole)
        if not self.sums.places:
            self.sums.learn(dict(self.model.named_parameters()))
        if self._is_unit():
            args, kwargs = fsdp.cast_inputs(self.states[0], args, kwargs)
        try:
            with self.sums.gathers.ending(), ordinary(self.model):
                yield args, kwargs
        finally:
            self.sums.gathers.end_call()

    def enter(self, forward: Forward) -> None:
        forward.units, forward.weights = self, self._weights()
        forward.sums, forward.gathered = self.sums, self.sums.gathers.call
        self.forward = weakref.ref(forward)

    def in_graph(self) -> tuple[int, ...]:
        return tuple(self.sums.in_graph)

    def without_graph(self) -> None:
        self.sums.gathers.without_graph()

    def outputs(self, outputs: Any) -> Any:
        return fsdp.cast_outputs(self.states[0], outputs) if self._is_unit() else outputs

    def _is_unit(self) -> bool:
        """Return whether the model itself is a unit, not only modules in it."""
        return unit_of(self.model) is not None

    def _find_roots(self) -> None:
        """Learn which units are outermost, once, and refuse a unit around the model."""
        if self.roots:
            return
        self.states = _states(self.model)  # of units that the model got since it was transformed, too
        if any(map(fsdp.offloads, self.states)):
            raise OptionError(
                "FSDP2's CPU offload is not supported", advice="Leave out offload_policy=CPUOffloadPolicy()."
            )
        found: list[State] = []
        within: list[State] = []
        for state in self.states:
            if not any(state is one for one in within):
                if not fsdp.is_outermost(state):
                    raise OptionError(
                        "a unit of FSDP2 around the transformed model has units inside of it",
                        advice="Transform the outermost unit, or shard the transformed model as one unit.",
                    )
                fsdp.begin([state], self.model, (), {})
                found.append(state)
                within += fsdp.inner_units(state)
        self.roots = found

    def known_as(self, view: nn.Module) -> None:
        state = unit_of(self.model)
        if state is not None and fsdp.class_of(type(self.model)) is not type(self.model):
            fsdp.register(view, state)

    def check(self, asked: Asked, parameters: Mapping[str, Tensor]) -> None:
        whole = {id(whole) for _, whole in fsdp.pairs(self.states)}
        for quantity, kinds in zip(self.results.quantities, asked.by_quantity, strict=True):
            shared = places_of(quantity)
            for _, delivery in kinds.attributes:
                if delivery.place not in (LOCAL, *shared):
                    raise OptionError(
                        f"{delivery.place} of a parameter belongs to the whole parameter, and FSDP2 keeps shards",
                        advice="Ask for ClippedGrad, Grad, NormSample, SquaredGrad, GradVariance, GradDot, GradGram or "
                        "GradProjection, or use DistributedDataParallel.",
                    )
                if shared and id(parameters[delivery.parameter or ""]) not in whole:
                    raise OptionError(
                        f"{quantity} is of the samples of all processes, and '{delivery.parameter}' is in no unit of "
                        "FSDP2, whose processes add nothing up for it",
                        advice="Leave it out of fully_shard's ignored_params, or freeze it.",
                    )

    def parameters(self) -> list[nn.Parameter]:
        return [one for pair in (fsdp.pairs(self.states) if self.roots else ()) for one in pair]

    def shards(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        of = {id(whole): shard for shard, whole in fsdp.pairs(self.states)}
        return {name: of.get(id(parameter), parameter) for name, parameter in parameters.items()}

    def guard(self, guard: Guard, parameters: Mapping[str, Tensor]) -> None:
        """Guard the shards, to which FSDP2 adds without autograd; refuse what came before the first guard."""
        shards = self.shards(parameters)
        for name, shard in shards.items():
            whole = parameters[name]
            if not self.guarded and slot_of(whole) is None and not (shard.grad is None and whole.grad is None):
                raise UnclippedGrad(
                    f"parameter '{name}' has a p.grad from before the first transformed call of the sharded model, "
                    "and no guard saw it",
                    advice="Call zero_grad() of the optimizer and of the model before that call, with set_to_none.",
                )
        self.guarded = True
        for name, shard in shards.items():
            guard.join(name, shard)

    def _weights(self) -> Weights:
        """Return what tells whether the weights have changed."""
        return tuple((id(shard), version(shard)) for shard, _ in fsdp.pairs(self.states))

    def gather(self, weights: Weights, call: Call) -> None:
        """Gather the parameters again that were freed between a forward, with these weights, and its backward."""
        if weights != self._weights():
            raise OptionError(
                "parameters of a sharded model changed between a forward and its backward, which would mix old and new",
                advice="Call backward() first, then optimizer.step() or load_state_dict().",
            )
        self.waits = True
        with collective():
            self.sums.gathers.begin_backward(self.states, call, self.sums.alone())

    def all_in_shards(self, wholes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the shards of whole parameters, by the same names; raise if one is in no unit."""
        shards = self.shards(wholes)
        missing = [name for name, whole in wholes.items() if shards[name] is whole]
        if missing:
            raise OptionError(
                f"'{missing[0]}' is in no unit of FSDP2, which would not sum its gradients over the processes",
                advice="Call fully_shard on the model itself, too, without ignored_params.",
            )
        return shards

    def all_shards(self) -> list[Tensor]:
        return [shard for shard, _ in fsdp.pairs(self.states)]

    def altered_average(self) -> str:
        """Return what the user has set for which p.grad is not the average over all processes; "" for nothing."""
        return fsdp.altered_reduction(self.states)

    def check_averages(self) -> None:
        setting = self.altered_average()
        if setting:
            raise OptionError(
                f"a private step has to know how FSDP2 sums gradients over the processes, and this changes it: "
                f"{setting}",
                advice="Leave it out: FSDP2's average over all processes, in one backward a step. For parameters in "
                "bfloat16 convert the model before fully_shard.",
            )

    def free(self) -> None:
        """Free what a forward without a backward left whole: FSDP2 would not gather it again, and it may be old."""
        if self.waits:
            fsdp.free(self.states)
            self.waits = False

    def begin(self, forward: Forward, guarded: bool) -> None:
        """Note p.grad of the whole parameters before a backward call, and decide how it is reduced."""
        self.sums.begin(forward, self.states, guarded)
        if self.before is None:
            grads = [whole.grad for _, whole in fsdp.pairs(self.states)]
            self.before = [(grad, _count(grad)) for grad in grads]

    def _drop_failed(self) -> None:
        """Drop what a backward that raised has left on whole parameters, where the optimizer does not see it."""
        if self.before is None or current_task() != -1:
            return
        for (_, whole), (grad, count) in zip(fsdp.pairs(self.states), self.before, strict=True):
            if grad is None:
                whole.grad = None
            elif whole.grad is not None and (whole.grad is not grad or _count(grad) != count):
                raise OptionError(
                    "a backward raised after it had added to gradients that wait for set_requires_gradient_sync(True)",
                    advice="Call zero_grad() of the transformed model and of the optimizer, and begin the step anew.",
                )
        self.before = None

    def reduce(self, task: int, adds: bool, parameters: Mapping[str, Tensor], rows: int) -> None:
        """Reduce and shard p.grad behind the last callback of a backward call, once for all its forwards."""
        self.adds = adds or (self.adds and self.reducing == task)
        if self.reducing != task:
            self.reducing = task
            autograd_engine.queue_callback(partial(self._reduce, parameters, rows))

    @collective()
    def _reduce(self, parameters: Mapping[str, Tensor], rows: int) -> None:
        self.reducing = -1
        reduced = self.sums.end()
        for shard, whole in fsdp.pairs(self.states):
            move_local(whole, shard)
            if not reduced and self.adds and whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)  # every process reduces the same, whatever its samples used
        fsdp.reduce(self.roots, reduced)
        self.sums.deliver()
        self.results.reduce(fsdp.pairs(self.states), parameters.values(), rows)
        self.before = None
        self.waits = not fsdp.is_sharded(self.states)


def _count(grad: Tensor | None) -> int:
    """Return how often a gradient was written to; a DTensor does not count what its local part does."""
    return 0 if grad is None else version(fsdp.local_part(grad))


def units_of(model: nn.Module) -> Units | None:
    """Return a model's units; None where ``fully_shard`` has made none."""
    return Units(model) if _states(model) else None


def check_not_sharded(model: nn.Module, what: str) -> None:
    """Refuse what calls a model in other ways than a training step does."""
    if units_of(model) is not None:
        raise OptionError(
            f"{what} does not know models that FSDP2 has sharded",
            advice="Use the model before fully_shard, in one process or under DistributedDataParallel.",
        )
    check_not_parallel(model, what)


def check_around(parameters: Iterable[Tensor]) -> None:
    """Refuse an empty batch in a unit around the model, which reduces before the zeros are there."""
    if fsdp.manages(parameters):
        raise BatchSizeError(
            "the batch is empty, and a unit of FSDP2 around the transformed model reduces nothing for it, while other "
            "processes wait",
            advice="Call fully_shard on the transformed model and its modules instead: then batches may be empty.",
        )


def check_alone(private: bool, first_batch: bool) -> None:
    """Refuse what would run beside a divided model and does not know parts of it."""
    if private:
        raise OptionError(
            "the model was divided by fully_shard or parallelize_module after make_private: noise would be drawn for "
            "each part alone",
            advice="Call fully_shard first, make the optimizer then, and call make_private last.",
        )
    if first_batch:
        raise OptionError(
            "check_first_batch does not know models that are divided over processes",
            advice="Leave it out, and check the model in one process.",
        )


def _states(model: nn.Module) -> list[State]:
    found: dict[int, State] = {}
    for module in model.modules():
        state = unit_of(module)
        if state is not None:
            found.setdefault(id(state), state)
    return list(found.values())
