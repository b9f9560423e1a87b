"""From one captured graph to one callable: the passes, the inner compiler, and the ghosts around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.batch import LOST, SHARED
from fxgrad.context import Context, Mixing, TrainableParameter, source_line
from fxgrad.errors import BatchSizeError, LostLayout, OptionError, UniformOutput
from fxgrad.layouts import Kind, Samples
from fxgrad.passes.infer_samples import infer_samples
from fxgrad.pipeline import PASSES, SINGLE, run_passes
from fxgrad.quantities import GradSample, Quantity
from fxgrad.store import Forward, Ghosts, Store, watch
from fxgrad.symbols import Symbols, expression

SAMPLE_DIM = "_fxgrad_sample_dim"  # on an input tensor, during a call: where it holds the samples
Inner = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass
class Options:
    """What the user asked for."""

    quantity: Quantity = field(default_factory=GradSample)
    loss_scale: float | str = 1
    mixing: Mixing = "error"
    backend: str | Inner = "inductor"
    fullgraph: bool = True


def inner_compiler(backend: str | Inner) -> Inner:
    """The compiler behind: Inductor, AOTAutograd alone, nothing, or the user's own."""
    if callable(backend):
        return backend
    if backend == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx  # type: ignore[return-value]
    if backend == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    if backend == "eager":
        return lambda gm, example_inputs: gm.forward
    raise OptionError(
        f"backend has to be 'inductor', 'aot_eager', 'eager' or a callable, not {backend!r}"
    )


@dataclass
class Captured:
    """One graph from Dynamo: its inputs, and what they are to the samples."""

    gm: fx.GraphModule
    examples: Sequence[Any]
    batch_size: int
    names: dict[int, str]  # id(parameter) -> the user's name
    fullgraph: bool = True
    buffers: frozenset[int] = frozenset()  # id(buffer)
    positional: Sequence[str] = ()  # the names of forward's positional arguments

    def __post_init__(self) -> None:
        self.placeholders = self.gm.graph.find_nodes(op="placeholder")
        self.values = [node.meta["example_value"] for node in self.placeholders]

    def trainable(self) -> list[int]:
        """The positions of trainable parameters among the inputs."""
        return [
            i
            for i, example in enumerate(self.examples)
            if isinstance(example, nn.Parameter) and example.requires_grad
        ]

    def name(self, i: int) -> str:
        """The user's name for an input: ``encoder.weight``, ``x``, ``batch['ids']``."""
        known = self.names.get(id(self.examples[i]))
        return known if known is not None else input_name(self.placeholders[i], self.positional)

    def sample_dims(self) -> dict[int, int]:
        """Input position -> sample dimension."""
        dims = {}
        for i in self.inputs():
            dim = self._role(i)
            if dim == LOST:
                raise self._lost(i)
            if dim != SHARED:
                dims[i] = dim
        return dims

    def inputs(self) -> list[int]:
        """The positions of tensors that are neither parameters nor buffers."""
        return [
            i
            for i, example in enumerate(self.examples)
            if isinstance(example, Tensor)
            and not isinstance(example, nn.Parameter)
            and id(example) not in self.buffers
        ]

    def _role(self, i: int) -> int:
        """The mark of a user's input or of an earlier graph's output; else the input's size decides."""
        example = self.examples[i]
        role = getattr(example, SAMPLE_DIM, None)
        if role is not None or self.fullgraph:
            return SHARED if role is None else int(role)
        equal = [dim for dim, size in enumerate(example.shape) if size == self.batch_size]
        if len(equal) > 1:  # Dynamo has seen some of them vary
            equal = [dim for dim in equal if isinstance(self.values[i].shape[dim], torch.SymInt)]
        if self.batch_size in example.shape:
            return equal[0] if len(equal) == 1 else LOST
        multiple = any(size > 0 and size % self.batch_size == 0 for size in example.shape)
        return LOST if multiple else SHARED

    def traced(self, i: int) -> bool:
        """Whether a parameter's gradient flows into an input: an earlier graph's output may carry it."""
        return not self.fullgraph and bool(self.values[i].requires_grad)

    def _lost(self, i: int) -> LostLayout:
        user = next(iter(self.placeholders[i].users), self.placeholders[i])
        shape = ", ".join(map(str, self.examples[i].shape))
        return LostLayout(
            f"where the {self.batch_size} samples are in a value of shape [{shape}] is lost at a graph break",
            where=source_line(user),
            advice="Give the samples a dimension of their own before the break.",
        )


def input_name(node: fx.Node, positional: Sequence[str]) -> str:
    """The name of a graph input in terms of forward's arguments: ``L['args'][1]['y']`` is ``y['y']``."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    text = str(name() if callable(name) else name)
    found = re.fullmatch(r"L\['args'\]\[(\d+)\](.*)", text)
    if found:
        i = int(found[1])
        return (positional[i] if i < len(positional) else f"args[{i}]") + found[2]
    found = re.fullmatch(r"L\['kwargs'\]\['(\w+)'\](.*)", text)
    return found[1] + found[2] if found else node.name


def compile_graph(captured: Captured, options: Options, store: Store) -> Callable[..., Any]:
    """The callable that Dynamo runs in the graph's place."""
    trainable = captured.trainable()
    inner = inner_compiler(options.backend)
    if not trainable:
        return _without_parameters(captured, options, inner)
    single = captured.batch_size == 1
    dims = {} if single else captured.sample_dims()
    ctx = make_context(captured, options, dims, single=single)
    with _own_saved_tensors():
        gm = run_passes(captured.gm, ctx, SINGLE if single else PASSES)
    uniform = reached_by_parameters_alone(captured) if single else uniform_outputs(gm)
    roles = {} if single or options.fullgraph else output_roles(gm)
    compiled = inner(gm, _inner_inputs(captured, trainable, dims))
    names = [captured.name(i) for i in trainable]
    return Transformed(compiled, trainable, names, dims, uniform, roles, store, captured.batch_size)


def _own_saved_tensors() -> Any:
    """The passes run ops on fake tensors, which the hooks of a checkpoint around the model may not see."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _without_parameters(captured: Captured, options: Options, inner: Inner) -> Callable[..., Any]:
    """A graph without trainable parameters runs as it is; a later one has to find the samples in its outputs."""
    dims = {} if captured.fullgraph or captured.batch_size == 1 else captured.sample_dims()
    if not dims:
        return inner(captured.gm, captured.values)
    passes = PASSES[: PASSES.index(infer_samples) + 1]
    gm = run_passes(captured.gm, make_context(captured, options, dims), passes)
    compiled, roles = inner(captured.gm, captured.values), output_roles(gm)

    def run(*args: Any) -> Any:
        return _with_roles(compiled(*args), roles)

    return run


def _with_roles(outputs: Any, roles: dict[int, int]) -> Any:
    """A graph's outputs, marked for the graph behind a graph break."""
    for i, role in roles.items():
        setattr(outputs[i], SAMPLE_DIM, role)
    return outputs


def make_context(
    captured: Captured, options: Options, dims: dict[int, int], *, single: bool = False
) -> Context:
    """The passes' context: their own symbols, and the inputs as fake values in them."""
    symbols = Symbols()
    placeholders = captured.placeholders
    parameters = [
        TrainableParameter(placeholders[i].name, captured.name(i), tuple(captured.examples[i].shape))
        for i in captured.trainable()
    ]
    inputs = {} if single else _own_inputs(captured, symbols, dims)
    return Context(
        symbols,
        inputs,
        parameters,
        {placeholders[i].name: dim for i, dim in dims.items()},
        options.quantity,
        options.loss_scale,
        options.mixing,
        {placeholders[i].name: captured.name(i) for i in range(len(placeholders))},
    )


def _own_inputs(captured: Captured, symbols: Symbols, dims: dict[int, int]) -> dict[str, Any]:
    """Fake inputs in which the sample dims, and they alone, carry B."""
    if not dims:
        raise BatchSizeError(
            "the model uses no input that holds samples: its parameters have no per-sample gradients",
            advice="Check which inputs hold samples, and name their dimensions with in_dims=.",
        )
    batch = symbols.batch(hint=_hint(captured))
    known: dict[Any, Any] = {}
    for i, dim in dims.items():
        size = captured.values[i].shape[dim]
        if isinstance(size, torch.SymInt):
            known[expression(size)] = batch

    def translate(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = expression(size)
        if expr not in known:
            hint = size.node.hint if size.node.hint is not None else 7
            known[expr] = symbols.new(f"T{len(known)}", hint)
        return known[expr]

    return {
        node.name: _own_input(value, dims.get(i), batch, translate, symbols, traced=i in dims and captured.traced(i))
        for i, (node, value) in enumerate(zip(captured.placeholders, captured.values, strict=True))
    }


def _own_input(
    value: Any, dim: int | None, batch: Any, translate: Any, symbols: Symbols, *, traced: bool
) -> Any:
    if isinstance(value, torch.SymInt):
        return translate(value)
    if not isinstance(value, Tensor):
        return value
    sizes = [batch if d == dim else translate(size) for d, size in enumerate(value.shape)]
    parameter = isinstance(value, nn.Parameter) and value.requires_grad
    with symbols.mode, torch.enable_grad():
        order = sorted(range(len(sizes)), key=lambda d: _stride_hint(value.stride(d)), reverse=True)
        dense = torch.empty([sizes[d] for d in order], dtype=value.dtype, device=value.device)
        own = dense.permute([order.index(d) for d in range(len(sizes))])
        if traced:
            return own.requires_grad_().clone()  # no leaf: the graph may change it in place
        return nn.Parameter(own) if parameter else own


def _stride_hint(stride: Any) -> int:
    return int(stride.node.hint) if isinstance(stride, torch.SymInt) else int(stride)


def _hint(captured: Captured) -> int:
    """A number of samples that no other size is mistaken for, with the real one's divisors."""
    return captured.batch_size * 1009


def _inner_inputs(
    captured: Captured, trainable: Sequence[int], dims: dict[int, int]
) -> list[Any]:
    """What the inner compiler sees: parameters that need no gradient, and a ghost for each."""
    values = list(captured.values)
    n: Any = captured.batch_size
    if dims and captured.batch_size != 1:
        i, dim = next(iter(dims.items()))
        n = values[i].shape[dim]
    ghosts = []
    for i in trainable:
        value = values[i]
        with value.fake_mode:
            values[i] = value.detach()
            ghosts.append(value.detach().new_empty(()).expand(n, *value.shape).requires_grad_())
    return values + ghosts


def uniform_outputs(gm: fx.GraphModule) -> list[int]:
    """The outputs that depend on trainable parameters and on no sample."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    found = []
    for i, node in enumerate(outputs):
        samples = node.meta.get("samples") if isinstance(node, fx.Node) else None
        if isinstance(samples, Samples) and samples.kind is Kind.UNIFORM and node.meta.get("traced", True):
            found.append(i)
    return found


def reached_by_parameters_alone(captured: Captured) -> list[int]:
    """The same for a batch of one, whose graph says nothing about samples."""
    held = {
        captured.placeholders[i]
        for i in captured.inputs()
        if getattr(captured.examples[i], SAMPLE_DIM, None) != SHARED
    }
    traced = {captured.placeholders[i] for i in captured.trainable()}
    for node in captured.gm.graph.nodes:
        if held.intersection(node.all_input_nodes):
            held.add(node)
        if traced.intersection(node.all_input_nodes):
            traced.add(node)
    outputs = captured.gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    return [i for i, node in enumerate(outputs) if node in traced and node not in held]


def output_roles(gm: fx.GraphModule) -> dict[int, int]:
    """Output position -> where a later graph, behind a graph break, finds the samples in it."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    roles = {}
    for i, node in enumerate(outputs):
        samples = node.meta.get("samples") if isinstance(node, fx.Node) else None
        if not isinstance(samples, Samples):
            continue
        if samples.kind is Kind.BATCHED and samples.layout is not None and not samples.layout.merged:
            roles[i] = samples.layout.dim
        else:
            roles[i] = LOST if samples.kind in (Kind.BATCHED, Kind.MIXED) else SHARED
    return roles


class _Uniform(torch.autograd.Function):
    """An output of parameters alone: a gradient that arrives belongs to no sample."""

    @staticmethod
    def forward(value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None:
            raise UniformOutput(
                "a gradient arrived at an output of the model that depends on parameters alone: "
                "it belongs to no sample",
                advice="Compute penalties on parameters outside of the model.",
            )
        return None, None


@dataclass
class Transformed:
    """A compiled graph with its ghosts."""

    compiled: Callable[..., Any]
    trainable: Sequence[int]
    names: Sequence[str]  # of the trainable parameters
    dims: dict[int, int]
    uniform: Sequence[int]
    roles: dict[int, int]
    store: Store
    batch_size: int

    def __call__(self, *args: Any) -> Any:
        n = self._batch_size(args)
        parameters = [args[i] for i in self.trainable]
        forward = self.store.current.forward or self._own_forward(n, parameters)
        self._check_size(n, forward.size)
        ghosts = Ghosts.apply(self.store, forward, n, *parameters)  # type: ignore[no-untyped-call]
        inputs = list(args)
        for i in self.trainable:
            inputs[i] = args[i].detach()
        outputs = list(self.compiled(*inputs, *ghosts))
        for i in self.uniform:
            outputs[i] = _Uniform.apply(outputs[i], ghosts[0])  # type: ignore[no-untyped-call]
        _with_roles(outputs, self.roles)
        if torch.is_grad_enabled():
            forward.ghosts.append(ghosts[0].grad_fn)
            if self.store.current.forward is None:
                watch([out for out in outputs if isinstance(out, Tensor)], self.store, forward)
        return outputs

    def _own_forward(self, n: int, parameters: Sequence[Tensor]) -> Forward:
        """Where torch.compile called the backend, nobody began a forward: this graph is all of it."""
        forward = Forward(n, dict(zip(self.names, parameters, strict=True)))
        if torch.is_grad_enabled():
            self.store.check_clear(forward.parameters, forward.enclosing, "a forward")
        return forward

    def _check_size(self, n: int, size: int) -> None:
        """What was batched by its size at a graph break has to go on being so."""
        if n != size:
            raise LostLayout(
                f"a value that held the samples before has {n} rows for {size} samples now",
                advice="Pass in_dims= to say which inputs hold samples, and remove graph breaks between them.",
            )

    def _batch_size(self, args: Sequence[Any]) -> int:
        if self.batch_size == 1:
            return 1
        sizes = {args[i].shape[dim] for i, dim in self.dims.items()}
        if len(sizes) != 1:
            raise LostLayout(
                f"values that held the same samples now have different sizes: {sorted(sizes)}",
                advice="Pass in_dims= to say which inputs hold samples.",
            )
        return int(sizes.pop())
