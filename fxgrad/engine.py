"""The engine: TorchDynamo traces a model with a symbolic batch size, and the engine runs the rewritten graph."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.captured import SAMPLE_DIM, Captured
from fxgrad.capture.checks import (
    LastParameters,
    are_ordinary,
    check_call,
    check_frozen_outputs,
    check_groups,
    check_hooks,
    check_sample_weight,
    check_takes_sample_weight,
)
from fxgrad.capture.distributed import check_averages_last
from fxgrad.capture.division import Division
from fxgrad.capture.divisions import division_of
from fxgrad.capture.dynamo import (
    CapturedCall,
    as_originals,
    check_configured,
    current_call,
    fresh_function,
    is_capturing,
    runs_as_originals,
)
from fxgrad.capture.dynamo_errors import (
    StatesMoved,
    captured_nothing,
    fails_without_dynamo,
    fixes_the_batch,
    moves_states,
    not_captured,
    too_many_graphs,
    translated,
)
from fxgrad.capture.named_parameters import NamedParameters
from fxgrad.capture.options import Options
from fxgrad.capture.progress import stage
from fxgrad.capture.sharded import check_alone, check_around, check_not_sharded
from fxgrad.compile.compiler import compile_graph
from fxgrad.compile.whole_step import no_gradient
from fxgrad.errors import FxgradError, OptionError
from fxgrad.first_batch.check import FirstBatch
from fxgrad.host.dynamo import FailOnRecompileLimitHit, active_callback, traces_backward
from fxgrad.host.modules import on_other_tensors, without_checkpoints
from fxgrad.host.pytree import tree_leaves
from fxgrad.kernels.recurrent.packed import as_pytorch_packs, with_indices
from fxgrad.ops.families import CHANGES
from fxgrad.repeated_step import MISSED, RepeatedStep
from fxgrad.runtime.accumulation import check_uncounted
from fxgrad.runtime.autograd_graph import used_outside
from fxgrad.runtime.computed import stepped
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.placeholders import Unseen, tensors_of, watch
from fxgrad.runtime.processes import telling
from fxgrad.runtime.store import Store, clear
from fxgrad.samples.batch import Batch, Roles
from fxgrad.samples.recurrent_states import inputs_as_states

_ONLY_TENSORS = {Tensor}
_requires_grad = attrgetter("requires_grad")  # for `map`, which adds no Python frame


@dataclass
class Engine:
    """The runner of one model's transformed calls."""

    model: nn.Module
    options: Options
    roles: Mapping[str, Roles]  # by the name of the called method
    store: Store
    first_batch: FirstBatch | None = None  # until it is checked
    units: Division | None = None  # of a model that is divided over processes
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.named, self.last = NamedParameters(self.model), LastParameters()
        self.steps: set[str] = set()  # the methods that are functions of `forward_backward`
        self.repeated: dict[str, RepeatedStep] = {}  # how to run the next call of each
        self.options.quantities = self.store.computed
        # Those of the class: an instance attribute, as Accelerate sets, wraps the view's method, and would call itself.
        kind = type(self.model)
        self.originals = {n: inspect.getattr_static(kind, n).__get__(self.model, kind) for n in self.roles}
        self.grouped = any(q.group_size != 1 for q in self.options.quantities)
        self.single = self.options.mixing == "error" and any(q.alone for q in self.options.quantities)
        self.weighted = next((q for q in self.options.quantities if getattr(q, "sample_weight", False)), None)
        self.find_units()
        if self.store.guard is not None:  # p.grad is guarded from now on
            self.store.guard.watch(self.parameters(), self.model)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``model(*args)`` or ``model.forward(*args)``, so that backward fills grad_sample.

        While fxgrad captures an outer model, or runs it on no samples, a transformed part of it runs as the original.
        Under the user's torch.compile there is a graph break here, and the part runs as it is.
        """
        if torch.compiler.is_dynamo_compiling():
            if is_capturing():
                return self.original(method)(*args, **kwargs)
        elif runs_as_originals():
            return self.original(method)(*args, **kwargs)
        elif active_callback() is None:  # Dynamo is not active
            return self._call(method, args, kwargs)
        return self._call_undisturbed(method, args, kwargs)

    @torch.compiler.disable(reason="fxgrad compiles a transformed model by itself")  # type: ignore[untyped-decorator]
    def _call_undisturbed(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(method, args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.units is None:
            return self._call_whole(method, args, kwargs)
        if method in self.steps:
            check_not_sharded(self.model, "forward_backward")
        if self.units.outdated():
            self.find_units()
        self.units.free()
        if not torch.is_grad_enabled() or not any(map(_requires_grad, self.named.now().values())):
            return self._call_whole(method, args, kwargs)
        with telling(), self.units.whole(args, kwargs) as (args, kwargs):
            if not self.units.settled:
                self._settle(self.units)
            self.options.machine = self.units.machine
            outputs = self._call_whole(method, args, kwargs)
        return self.units.outputs(outputs)

    def _call_whole(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model while its parameters are whole tensors."""
        every = self.named.now() if torch.is_grad_enabled() else {}
        known = self.last.of(every)
        parameters = known or every
        if known is None and not all(map(_requires_grad, every.values())):
            parameters = {name: p for name, p in every.items() if p.requires_grad}
        if not parameters:
            return self._without_parameters(method, args, kwargs)
        if method in self.repeated and (outputs := self._repeat(method, args, kwargs, known and every)) is not MISSED:
            return outputs
        nested = bool(kwargs) or set(map(type, args)) != _ONLY_TENSORS
        leaves = tree_leaves((args, kwargs)) if nested else args
        ordinary = are_ordinary(leaves) and (known is not None or self.last.are_ordinary(every, parameters))
        if not ordinary and self._was_sharded(parameters, leaves):
            return self._call(method, args, kwargs)
        weight = self.pop_sample_weight(method, kwargs)
        indices_of_packs: dict[int, Tensor] = {}
        if nested:
            args, kwargs = with_indices((args, kwargs), indices_of_packs)
        batch = self.roles[method].find(args, kwargs)
        if self.grouped or weight is not None or kwargs:
            self._check_samples(batch, weight, kwargs)
        forward = Forward(batch.size, parameters, weight, method, self.last.unchanged)
        self._begin(forward, every)
        before = self.store.enter(forward)
        try:
            run = self._run if batch.size else self._on_no_samples
            outputs = run(forward, batch, args, kwargs)
            if type(outputs) is Tensor:
                tensors = [outputs]
            else:
                outputs = as_pytorch_packs(outputs, indices_of_packs)
                tensors = tensors_of(outputs)
            watch(tensors, self.store, forward)  # of an empty batch, and of code after a graph break
        finally:
            self.store.leave(forward, before)
        self._end(forward, tensors)
        return self._delivered(forward, args, kwargs, outputs) if method in self.steps else outputs

    def _repeat(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], every: Any) -> Any:
        """Run a whole step as the one before it; where that cannot be, forget the latter, and return `MISSED`."""
        repeated = self.repeated.pop(method, None)  # nobody else has it meanwhile
        if repeated is None or every is None or kwargs or not repeated.fits(args, self.roles[method]):
            return MISSED
        if self.store.guard is not None:
            self.store.guard.watch(every, self.model)
        outputs = repeated.computed(args)
        if not repeated.delivered(outputs):
            return stepped(self.store, repeated.forward, outputs)
        self.repeated[method] = repeated
        return outputs

    def _delivered(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Deliver what a whole step has computed, and learn how the next one can do the same."""
        outputs = stepped(self.store, forward, outputs)
        repeated = None if kwargs or self.first_batch else RepeatedStep.of(self.store, forward, args, outputs)
        if repeated is not None:
            self.repeated[forward.method] = repeated
        return outputs

    def _without_parameters(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the original: nothing is trained, or gradients are switched off."""
        if method in self.steps:
            raise no_gradient()
        self.pop_sample_weight(method, kwargs)
        outputs = self.original(method)(*args, **kwargs)
        check_frozen_outputs(outputs, (args, kwargs))
        return outputs

    def _check_samples(self, batch: Batch, weight: Any, kwargs: dict[str, Any]) -> None:
        """Refuse groups, weights and divisors that do not go with the samples of a call."""
        if self.grouped:
            check_groups(self.options.quantities, batch.size)
        if self.single:
            check_uncounted(kwargs)
        if weight is not None and self.weighted is not None:
            check_sample_weight(weight, self.weighted.units(batch.size))

    def _was_sharded(self, parameters: Mapping[str, Tensor], leaves: Sequence[Any]) -> bool:
        """Return whether the model was divided since it was transformed; refuse other calls that are not ordinary."""
        if self.units is None and self.find_units():
            return True
        check_call(self.model, parameters, leaves)
        return False

    def find_units(self) -> bool:
        """Learn whether the processes have divided the model, and return it."""
        units = division_of(self.model)
        if units is None:
            return False
        whole_step = self.options.mixing == "error" and self.options.fullgraph and self.first_batch is None
        if units.one_program and not whole_step:
            raise OptionError(
                "mixing='allow', fullgraph=False and check_first_batch do not know tensor-parallel models",
                advice="Leave them out, and check the model in one process.",
            )
        self._settle(units)
        self.units = units
        return True

    def _settle(self, units: Division) -> None:
        """Let graphs compute what the processes can put together, from here on."""
        asked = dataclasses.replace(self.options, quantities=self.store.computed)
        self.options = units.settle(asked, self.store.policy)
        self.store.deliver_instead(self.options.quantities)
        self.compiled.clear()

    def _begin(self, forward: Forward, every: Mapping[str, nn.Parameter]) -> None:
        """Let the guard watch every parameter, and refuse results of an earlier backward."""
        guard = self.store.guard
        if guard is not None:
            if forward.averaged:
                check_averages_last()
            if self.units is not None:
                self.units.guard(guard, every)
            guard.watch(every, self.model)
            forward.view = guard.view and guard.view()
        if self.units is not None:
            self.units.enter(forward)
            check_alone(any(not one.shards for one in self.store.observers), self.first_batch is not None)
            if self.store.observers:
                self.units.check_averages()
            self.units.check(self.store.asked_of(forward), forward.parameters)
        self.store.check_clear(forward, forward.enclosing, "a forward")
        if self.first_batch is not None and self.first_batch.due(forward.size, forward.parameters):
            forward.first_batch = self.first_batch

    def _end(self, forward: Forward, tensors: Sequence[Tensor]) -> None:
        """Check what the model's own code may have done in the call."""
        if self.store.guard is None and not self.store.adds_to_grad(forward):
            check_hooks(forward.parameters)  # after the call, as forward may set hooks
        if self.first_batch is not None and self.first_batch.passed:
            self.first_batch = forward.first_batch = None
        if forward.computed is not None:
            return
        if self.options.fullgraph:
            if not forward.placeholders and (names := used_outside(tensors, self.names())):
                self.compiled.clear()  # Dynamo may skip that function from now on
                raise not_captured(names)
        else:
            forward.outside = used_outside(tensors, self.names())
            for tensor in tensors:
                tensor.__dict__.pop(SAMPLE_DIM, None)  # the mark was for the next graph

    def pop_sample_weight(self, method: str, kwargs: dict[str, Any]) -> Tensor | None:
        """Take ``sample_weight=`` out of a call's arguments if a quantity uses it."""
        if self.weighted is not None:
            weight: Tensor | None = kwargs.pop("sample_weight", None)
            return weight
        if "sample_weight" in kwargs:
            entrance = self.originals["forward" if method == "__call__" else method]
            check_takes_sample_weight(entrance, self.options.quantities)
        return None

    def clear_results(self, parameters: Sequence[nn.Parameter]) -> None:
        """Forget what backwards have left, on the shards of a divided model, too."""
        if self.units is not None:
            whole_and_shards = self.units.parameters()
            clear(whole_and_shards)
            for parameter in whole_and_shards:
                parameter.grad = None
        self.store.results.clear()
        self.store.cleared(parameters)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters by name."""
        return self.named.now()

    def names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def original(self, method: str) -> Callable[..., Any]:
        return self.model if method == "__call__" else self.originals[method]

    def _run(self, forward: Forward, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method, fullgraph = forward.method, self.options.fullgraph
        # Not every version of Dynamo guards on requires_grad, so the trainable parameters are part of the key.
        gathered = () if self.units is None else self.units.in_graph()
        key = method, len(CHANGES), *forward.parameters, *map(str, gathered)
        compiled = self.compiled.get(key)
        if compiled is None:
            function = fresh_function(self.original(method))
            compiled = self.compiled[key] = torch.compile(function, backend=self._backend, fullgraph=fullgraph)
        forward.compiled = compiled
        try:
            try:
                return CapturedCall(batch, args, kwargs, fullgraph, self.model).run(compiled)
            except Exception as error:
                if moves_states(error):
                    return self._run(forward, self.roles[method].find(args, kwargs), args, kwargs)
                if not fixes_the_batch(error):
                    raise
            # PyTorch's shape rules may confuse the batch size with an equal size (`where` with two rows). Then the
            # graph is for this size only. The passes still see a symbolic batch size.
            return CapturedCall(batch, args, kwargs, False, self.model).run(compiled)
        except FailOnRecompileLimitHit:
            raise too_many_graphs(compiled, self.roles[method].names) from None
        except Exception as error:
            if captured_nothing(error):
                del self.compiled[key]  # Dynamo skips that function from now on
                raise not_captured(forward.parameters) from None
            if not gathered and fails_without_dynamo(error):  # without the graph the parameters are not whole
                with torch.no_grad():  # let PyTorch raise its own error
                    self.original(method)(*args, **kwargs)
            user_error = translated(error, self.options, self.model)
            if user_error is error:
                raise
            raise user_error from (None if isinstance(user_error, FxgradError) else error)

    def _backend(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        check_configured()
        if traces_backward():
            raise OptionError(
                "torch._dynamo.config.trace_autograd_ops: what a traced backward adds to p.grad passes no guard",
                advice="Leave it off: fxgrad compiles the backward by itself.",
            )
        forward = self.store.current.forward
        assert forward is not None
        ops = sum(node.op.startswith("call") for node in gm.graph.nodes)
        stage(f"TorchDynamo captured {ops} ops of {type(self.model).__name__}, a batch of {forward.size},")
        if self.units is not None:
            self.units.check_graph(gm)
        captured = self.captured(gm, examples, forward.size, forward.method)
        return compile_graph(captured, self.options, self.store, whole=forward.method in self.steps)

    def captured(self, gm: fx.GraphModule, examples: Sequence[Any], size: int, method: str) -> Captured:
        """Wrap a graph from Dynamo with what the model and its running call know of the inputs."""
        call = current_call()
        assert call is not None
        buffers = frozenset(id(buffer) for buffer in self.model.buffers())
        fullgraph, roles = self.options.fullgraph, self.roles[method]
        arguments = {"args": call.args, "kwargs": call.kwargs}
        captured = Captured(gm, examples, size, self.names(), fullgraph, buffers, roles.names, arguments)
        self._check_states(captured, roles, call)
        return captured

    def _check_states(self, captured: Captured, roles: Roles, call: CapturedCall) -> None:
        """Learn the states that the graph shows, and raise if their roles differ. See Note [States]."""
        nodes = inputs_as_states(captured.gm)
        states = {id(captured.examples[i]) for i in captured.inputs if captured.placeholders[i] in nodes}
        fullgraph = self.options.fullgraph  # after a graph break, earlier graphs have already run
        news = fullgraph and roles.learn_states(call.args, call.kwargs, call.batch.size, states)
        if news and any(call.batch.dims.get(one, 1) != 1 for one in states):
            raise StatesMoved
        strays = call.batch.supposed - states
        if call.batch.disagreement is not None and any(id(example) in strays for example in captured.examples):
            raise call.batch.disagreement

    def _on_no_samples(self, forward: Forward, _: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an empty batch on the original model; there is nothing to compile or to sum."""
        if self.units is None:
            check_around(forward.parameters.values())
        else:
            self.units.without_graph()
        stand_ins = Unseen.apply(forward, *forward.parameters.values())  # type: ignore[no-untyped-call]
        self.store.began(forward, stand_ins[0].grad_fn)
        others = dict(zip(forward.parameters, stand_ins, strict=True))
        with on_other_tensors(self.model, others), without_checkpoints(), as_originals():
            return self.original(forward.method)(*args, **kwargs)
