"""From one captured graph to one callable: the passes, the inner compiler, and the gradient placeholders around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, fx, nn

from fxgrad.capture.captured import SAMPLE_DIM, Captured
from fxgrad.capture.checks import check_numbers, check_parameters
from fxgrad.capture.options import Inner, Options
from fxgrad.capture.progress import compilation, stage
from fxgrad.compile.context_of import make_context
from fxgrad.compile.dry_run import rehearse
from fxgrad.compile.gathers import gather_units
from fxgrad.compile.inductor import inner_compiler
from fxgrad.compile.interface import Interface, Uniform, input_writes, interface_of, output_roles, outputs_of
from fxgrad.compile.memory_limit import Room
from fxgrad.compile.pipeline import ANALYSIS, DEFINITIONS, LAST, NAMES, ONE, SINGLE, passes_of, run_passes
from fxgrad.compile.requires_grad import check_requires_grad
from fxgrad.compile.warm_start import warm_start
from fxgrad.costs.choices import check_applied
from fxgrad.errors import FxgradError, GraphBreak, LostLayout, OptionError
from fxgrad.graph.context import Context
from fxgrad.host.dynamo import CaptureAgain, innermost_fn, release_floats, specialize_floats
from fxgrad.host.functorch import aot_settings
from fxgrad.kernels.memory import keep_memory
from fxgrad.ops.calls import op_name
from fxgrad.ops.values import memories
from fxgrad.quantities import Delivery
from fxgrad.quantities.base import check_deliveries
from fxgrad.quantities.read import Reading, is_users
from fxgrad.rules.registry import RULES
from fxgrad.runtime.autograd_graph import leaves_behind
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.placeholders import Placeholders, watch
from fxgrad.runtime.refusals import before_the_graph
from fxgrad.runtime.store import Store
from fxgrad.runtime.targets import TAPS
from fxgrad.terms.work import Way


@compilation()
def compile_graph(captured: Captured, options: Options, store: Store) -> Callable[..., Any]:
    """Compile a graph: Dynamo runs what is returned in the graph's place.

    If that fails, and numbers of the model are inputs since they changed, Dynamo captures it with their values.
    """
    try:
        compiled = _compile_graph(captured, options, store)
    except CaptureAgain:
        raise
    except Exception as error:
        if specialize_floats(captured.values):
            raise CaptureAgain from error
        release_floats()
        raise
    release_floats()
    return compiled


def _compile_graph(captured: Captured, options: Options, store: Store) -> Callable[..., Any]:
    captured.check_leaves()
    captured.check_objects()
    inner = inner_compiler(options.backend)
    check_requires_grad(captured.gm, captured.traced_inputs(), partial(_with_names, captured, options))
    if not captured.trainable:
        return _without_parameters(captured, options, inner)
    parameters = {name: captured.examples[i] for name, i in captured.trainable.items()}
    check_parameters(parameters)
    check_numbers(parameters)
    passes = passes_of(captured.batch_size, options.quantities)
    dims = None if passes is SINGLE else captured.held() if passes is ONE else captured.dims
    ctx = make_context(captured, options, dims)
    check_deliveries(options.quantities, captured.batch_size, parameters)
    read = _read(captured.gm, options)  # before it is traced, as it may write to it
    room = Room(options.quantities, parameters, options.memory_limit)
    with _own_saved_tensors():
        gm = run_passes(captured.gm, ctx, (*passes, *LAST))
        if not captured.single:
            _rehearse(gm, ctx, captured.batch_size, options, room)
    room.check(captured.batch_size)
    interface = interface_of(captured, gm, _with_names(captured, options) if captured.single else None)
    taps = sum(isinstance(node.target, TAPS) for node in gm.graph.nodes)
    stage(f"fxgrad's passes rewrote them to {len(gm.graph.nodes)} nodes, {taps} taps,")
    inputs = _inner_inputs(captured, options)
    with warm_start(gm, inputs, options.backend), _outputs_kept(gm):
        gather_units(_bare(gm, captured), captured, options.quantities, interface.writes)
        compiled = inner(gm, inputs)
    stage(f"the backend {getattr(options.backend, '__name__', options.backend)} finished")
    keep_memory()
    if isinstance(options.backend, str):
        compiled = innermost_fn(compiled)  # Dynamo disables itself around all of this
    given = [tuple(map(_number, value.shape)) for value in inputs[len(inputs) - len(ctx.given(1)) :]]
    for one in read:
        one.settle()
    return Transformed(compiled, interface, store, captured.batch_size, room, read, given)


def _with_names(captured: Captured, options: Options) -> fx.GraphModule:
    """Return the graph as Dynamo left it, with one name for each tensor."""
    return run_passes(captured.gm, make_context(captured, options, None), NAMES)


def _read(gm: fx.GraphModule, options: Options) -> list[Reading]:
    """Return what the user's functions read that are traced once: those of quantities, rules, and Python ops."""
    ops = {node.target for node in gm.graph.nodes if node.op == "call_function"}
    rules = [RULES[name] for name in dict.fromkeys(map(op_name, ops)) if name in RULES]
    others: list[Callable[..., Any]] = [
        *(quantity.compute for quantity in options.quantities if not quantity.own),
        *(rule.function for rule in rules if not rule.own),
        *(op for op in ops if isinstance(op, FunctionType) and is_users(op)),
    ]
    of_norms = [function for quantity in options.quantities for function in quantity.functions()]
    return [*map(Reading, of_norms), *(Reading(one, plain=True) for one in others)]


def _rehearse(gm: fx.GraphModule, ctx: Context, size: int, options: Options, room: Room) -> None:
    """Run a backward on fake tensors if it shows more: which strategies fit, and which gradients fill the memory.

    Raise before anything runs where strategy= does not fit.
    """
    tight = not any(quantity.dense for quantity in options.quantities) and room.is_tight(size)
    if not options.overrides and not tight:
        return
    try:
        chosen = rehearse(gm, ctx, size).chosen
    except Exception as error:  # what cannot be rehearsed is not counted, and is seen when the backward is traced
        if options.overrides and isinstance(error, FxgradError):
            raise
        return
    whole = options.fullgraph or not all(quantity.adds for quantity in options.quantities)  # this graph is all of it
    if options.overrides and whole:
        check_applied(options.overrides, chosen)
    if tight:
        # Their gradients are multiplied out where they are used, and kept to the end.
        room.held = frozenset(name for name, uses in chosen.items() if any(one.way is Way.MATERIALISE for one in uses))


# Note [Donated buffers]
# ~~~~~~~~~~~~~~~~~~~~~~
# A compiled backward may write over what the forward saved for it, where no output shares its memory. For a
# view of a tap's output AOTAutograd thinks so: the tap's copy, which Inductor removes, has memory of its own
# then. The user's output would change in the backward (seen on 2.13). So no buffer is donated by such a graph.
# Inductor's cache does not tell a backward with donated buffers from one without: the tag does, and the backward
# has to be compiled where the tag is set, beside the forward.


@contextlib.contextmanager
def _outputs_kept(gm: fx.GraphModule) -> Iterator[None]:
    """See Note [Donated buffers]."""
    tapped = {memory for node in gm.graph.nodes if isinstance(node.target, TAPS) for memory in memories(node)}
    parts = [node for node in outputs_of(gm) if isinstance(node, fx.Node) and not isinstance(node.target, TAPS)]
    if not any(memory in tapped for node in parts for memory in memories(node)):
        yield
        return
    tag = f"{torch.compiler.config.cache_key_tag} no donated buffers"
    with (
        aot_settings(donated_buffer=False, force_non_lazy_backward_lowering=True),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        yield


def _own_saved_tensors() -> Any:
    """Keep fake tensors, which the passes run ops on, from the hooks of a checkpoint around the model."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _without_parameters(captured: Captured, options: Options, inner: Inner) -> Callable[..., Any]:
    """Run a graph without trainable parameters as it is; a later one has to find the samples in its outputs."""
    dims = {} if captured.fullgraph else captured.dims
    defined = run_passes(captured.gm, make_context(captured, options, None), (*DEFINITIONS, *LAST))
    compiled = inner(defined, captured.values)
    if not dims and not captured.frozen:
        return compiled
    analysed = run_passes(captured.gm, make_context(captured, options, dims), ANALYSIS) if dims else None
    roles = {} if analysed is None else output_roles(analysed)
    writes = None if analysed is None else input_writes(captured, analysed)

    def run(*args: Any) -> Any:
        check_frozen(captured.frozen, args)
        if writes is not None:
            writes.check(args)
        return _with_roles(compiled(*args), roles)

    return run


def check_frozen(frozen: Mapping[int, str], args: Sequence[Any], now_frozen: Sequence[str] = ()) -> None:
    """Behind a graph break Dynamo of torch 2.11 does not look at requires_grad, and uses the same graph again."""
    changed = [name for i, name in frozen.items() if args[i].requires_grad] + list(now_frozen)
    if changed:
        raise GraphBreak(
            f"behind a graph break, what is trainable has changed since the first call: {', '.join(changed)}",
            advice="Call torch._dynamo.reset() after freezing or unfreezing, or remove the graph break.",
        )


def _with_roles(outputs: Any, roles: Mapping[int, int]) -> Any:
    """Return a graph's outputs, marked for the graph behind a graph break."""
    for i, role in roles.items():
        setattr(outputs[i], SAMPLE_DIM, role)
    return outputs


def _bare(gm: fx.GraphModule, captured: Captured) -> fx.GraphModule:
    """Return the graph without the detaching of parameters: the inner compiler gets them detached."""
    inputs = gm.graph.find_nodes(op="placeholder")
    for i in captured.trainable.values():
        for node in [user for user in inputs[i].users if user.target == "detach"]:
            if gm.graph.output_node() not in node.users:
                node.replace_all_uses_with(inputs[i])
                gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _inner_inputs(captured: Captured, options: Options) -> list[Any]:
    """List what the inner compiler sees: detached parameters, gradient placeholders, what the quantities are given."""
    values = list(captured.values)
    n: Any = next((values[i].shape[dim] for i, dim in captured.dims.items()), captured.batch_size)
    parameters = {name: values[i] for name, i in captured.trainable.items()}
    with next(iter(parameters.values())).fake_mode:
        placeholders = [
            _empty(d).requires_grad_() for q in options.quantities for d in q.deliveries(q.units(n), parameters)
        ]
        given = [_full(d) for q in options.quantities for d in q.inputs(q.units(n), parameters)]
        for i in captured.trainable.values():
            values[i] = values[i].detach()
    return values + placeholders + given


def _empty(delivery: Delivery) -> Tensor:
    """Return a gradient placeholder: the shape of what will be delivered, and one element of memory."""
    return torch.empty((), dtype=delivery.dtype, device=delivery.device).expand(delivery.shape)


def _full(delivery: Delivery) -> Tensor:
    return torch.empty(delivery.shape, dtype=delivery.dtype, device=delivery.device)


def _named(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return "a function of norms" if "<lambda>" in name else name.rpartition("<locals>.")[2]


_shape = attrgetter("shape")  # for `map`, which adds no Python frame


def _number(size: Any) -> int | None:
    """Return a size that a graph is made for; None for one that varies."""
    return size if isinstance(size, int) else None


def _fits(size: int, made_for: int | None) -> bool:
    return made_for in (size, None)


@dataclass
class Transformed:
    """A compiled graph with its gradient placeholders."""

    compiled: Callable[..., Any]
    interface: Interface
    store: Store
    batch_size: int
    room: Room
    read: Sequence[Reading]  # by functions of the user's
    shapes: Sequence[tuple[int | None, ...]]  # of what the quantities are given; None for sizes that vary

    def __post_init__(self) -> None:
        self.names, self.positions = tuple(self.interface.trainable), tuple(self.interface.trainable.values())
        self.last_shapes: list[torch.Size] = []

    def __call__(self, *args: Any) -> Any:
        n = self.size_of(args)
        interface, names, positions = self.interface, self.names, self.positions
        parameters = dict(zip(names, map(args.__getitem__, positions), strict=True))
        forward = self.store.current.forward or self._own_forward(n, parameters, args)
        if n != forward.size:
            raise self._other_size(n, forward.size)
        if self.read:
            self._check_read()
        if n > self.room.largest:
            self.room.check(n)
        if interface.frozen or names != forward.names:
            check_frozen(interface.frozen, args, sorted(parameters.keys() - forward.parameters.keys()))
        placeholders = Placeholders.of(self.store, forward, names, parameters.values())
        given = [value for q in self.store.quantities for value in q.values(forward, parameters)]
        shapes = [*map(_shape, given)]
        if shapes != self.last_shapes:
            self._check_given(shapes)
        if interface.writes is not None:
            interface.writes.check((*args, *given))
        if forward.first_batch is not None:
            forward.first_batch.check(self, args, parameters, given)
        inputs = list(args)
        for i in positions:
            inputs[i] = args[i].detach()
        outputs = list(self.compiled(*inputs, *placeholders, *given))
        for i in interface.uniform:
            outputs[i] = Uniform.apply(outputs[i], placeholders[0])  # type: ignore[no-untyped-call]
        if interface.roles:
            _with_roles(outputs, interface.roles)
        if torch.is_grad_enabled():
            self.store.began(forward, placeholders[0].grad_fn)
            watch(outputs, self.store, forward)
        return outputs

    def _check_given(self, shapes: list[torch.Size]) -> None:
        """Raise where a quantity gives other tensors than its graph was made for, as when directions were added."""
        fits = [map(_fits, shape, sizes) for shape, sizes in zip(shapes, self.shapes, strict=False)]
        if [*map(len, shapes)] != [*map(len, self.shapes)] or not all(map(all, fits)):
            raise OptionError(
                f"{' and '.join(map(str, self.store.quantities))}: given are tensors of the shapes "
                f"{[*map(list, shapes)]}, and the graph was made for {[*map(list, self.shapes)]}",
                advice="Keep the names and shapes of vectors, or transform the model again.",
            )
        self.last_shapes = shapes

    def _check_read(self) -> None:
        """Raise where a function of the user's, which is traced once, would read something else by now."""
        for one in self.read:
            name = one.changed()
            if name is not None:
                raise OptionError(
                    f"{name!r}, which {_named(one.function)} reads, is not what it was when its graph was made",
                    advice="For a bound that changes pass a tensor as max_grad_norm, and write to it; for other "
                    "numbers transform the model again.",
                )

    def _own_forward(self, n: int, parameters: dict[str, Tensor], args: Sequence[Any]) -> Forward:
        """Begin a forward if torch.compile called the backend: this graph is all of it, or follows others of ours."""
        made = [arg for arg in args if isinstance(arg, Tensor) and arg.grad_fn is not None]
        if used := [leaf for leaf in leaves_behind(made) if isinstance(leaf, nn.Parameter)]:
            raise before_the_graph(used)
        forward = Forward(n, parameters)
        self.store.owned = frozenset(map(id, parameters.values()))
        if torch.is_grad_enabled():
            if self.store.guard is not None:
                self.store.guard.watch(parameters)
            self.store.check_clear(forward, forward.enclosing, "a forward")
        return forward

    def _other_size(self, n: int, size: int) -> LostLayout:
        """What was batched by its size at a graph break has to go on being so."""
        return LostLayout(
            f"a value that held the samples before has {n} rows for {size} samples now",
            advice="Pass in_dims= to say which inputs hold samples, and remove graph breaks between them.",
        )

    def size_of(self, args: Sequence[Any]) -> int:
        """Return the number of samples in the graph's inputs."""
        if self.batch_size == 1:
            return 1
        sizes = {args[i].shape[dim] for i, dim in self.interface.dims.items()}
        if len(sizes) != 1:
            raise LostLayout(
                f"values that held the same samples now have different sizes: {sorted(sizes)}",
                advice="Pass in_dims= to say which inputs hold samples.",
            )
        return int(sizes.pop())
