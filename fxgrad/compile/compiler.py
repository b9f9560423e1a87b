"""From one captured graph to one callable: the passes, the inner compiler, and the gradient placeholders around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, fx

from fxgrad.capture.captured import Captured
from fxgrad.capture.checks import check_numbers, check_parameters
from fxgrad.capture.options import Inner, Options
from fxgrad.capture.progress import compilation, stage
from fxgrad.compile.context_of import make_context
from fxgrad.compile.dry_run import rehearse
from fxgrad.compile.gathers import gather_units
from fxgrad.compile.inductor import inner_compiler
from fxgrad.compile.interface import Interface, input_writes, interface_of, output_roles
from fxgrad.compile.memory_limit import Room
from fxgrad.compile.pipeline import ANALYSIS, DEFINITIONS, LAST, NAMES, ONE, SINGLE, WHOLE, passes_of, run_passes
from fxgrad.compile.requires_grad import check_requires_grad
from fxgrad.compile.transformed import Transformed, WholeStep, check_frozen, with_roles
from fxgrad.compile.warm_start import warm_start
from fxgrad.compile.whole_step import loss_among, no_gradient
from fxgrad.costs.choices import check_applied
from fxgrad.errors import FxgradError
from fxgrad.graph.context import Context
from fxgrad.graph.edit import outputs_of
from fxgrad.host.dynamo import CaptureAgain, innermost_fn, release_floats, specialize_floats
from fxgrad.host.functorch import aot_settings
from fxgrad.kernels.memory import keep_memory
from fxgrad.ops.calls import op_name
from fxgrad.ops.values import memories
from fxgrad.quantities import Delivery
from fxgrad.quantities.base import check_deliveries
from fxgrad.quantities.read import Reading, is_users
from fxgrad.rules.registry import RULES
from fxgrad.runtime.store import Store
from fxgrad.runtime.targets import TAPS
from fxgrad.terms.work import Way


@compilation()
def compile_graph(captured: Captured, options: Options, store: Store, whole: bool = False) -> Callable[..., Any]:
    """Compile a graph: Dynamo runs what is returned in the graph's place. ``whole``: with its backward in it.

    If that fails, and numbers of the model are inputs since they changed, Dynamo captures it with their values.
    """
    try:
        compiled = _compile_graph(captured, options, store, whole)
    except CaptureAgain:
        raise
    except Exception as error:
        if specialize_floats(captured.values):
            raise CaptureAgain from error
        release_floats()
        raise
    release_floats()
    return compiled


def _compile_graph(captured: Captured, options: Options, store: Store, whole: bool) -> Callable[..., Any]:
    captured.check_leaves()
    captured.check_objects()
    if options.backend not in ("eager", "aot_eager"):
        captured.check_negated()
    inner = inner_compiler(options.backend)
    check_requires_grad(captured.gm, captured.traced_inputs(), partial(_with_names, captured, options))
    if not captured.trainable:
        if whole:
            raise no_gradient()
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
    single = _with_names(captured, options) if captured.single else None
    interface = interface_of(captured, gm, single)
    taps = sum(isinstance(node.target, TAPS) for node in gm.graph.nodes)
    stage(f"fxgrad's passes rewrote them to {len(gm.graph.nodes)} nodes, {taps} taps,")
    inputs = _inner_inputs(captured, options)
    if whole:
        ctx.loss = loss_among(captured, gm, interface, single)
        gm = run_passes(gm, ctx, WHOLE)
        inputs = [_untraced(value) for value in inputs]
    compiled = _compiled(gm, inputs, captured, options, interface)
    given = [tuple(map(_number, value.shape)) for value in inputs[len(inputs) - len(ctx.given(1)) :]]
    for one in read:
        one.settle()
    made = compiled, interface, store, captured.batch_size, room, read, given
    return WholeStep(*made, ctx.loss, captured.other_tensors) if whole else Transformed(*made)


def _compiled(
    gm: fx.GraphModule, inputs: list[Any], captured: Captured, options: Options, interface: Interface
) -> Callable[..., Any]:
    """Return what the inner compiler makes of a rewritten graph."""
    with warm_start(gm, inputs, options.backend), _outputs_kept(gm):
        gather_units(_bare(gm, captured), captured, options.quantities, interface.writes)
        compiled = inner_compiler(options.backend)(gm, inputs)
    stage(f"the backend {getattr(options.backend, '__name__', options.backend)} finished")
    keep_memory()
    # Dynamo disables itself around all of this.
    return innermost_fn(compiled) if isinstance(options.backend, str) else compiled


def _untraced(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


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
        return with_roles(compiled(*args), roles)

    return run


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


def _number(size: Any) -> int | None:
    """Return a size that a graph is made for; None for one that varies."""
    return size if isinstance(size, int) else None
