"""From one captured graph to one callable: the passes, the inner compiler, and the ghosts around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.context import Context, Mixing, TrainableParameter
from fxgrad.errors import LostLayout, OptionError, UniformOutput
from fxgrad.layouts import Kind, Samples
from fxgrad.pipeline import PASSES, SINGLE, run_passes
from fxgrad.quantities import GradSample, Quantity
from fxgrad.store import Ghosts, Store
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

        return compile_fx
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
        return self.names.get(id(self.examples[i]), self.placeholders[i].name)

    def sample_dims(self) -> dict[int, int]:
        """Input position -> sample dimension."""
        dims = {}
        for i, example in enumerate(self.examples):
            if isinstance(example, Tensor) and not isinstance(example, nn.Parameter):
                dim = getattr(example, SAMPLE_DIM, None)
                if dim is None:
                    dim = self._handed_on(i)
                if dim is not None:
                    dims[i] = dim
        return dims

    def _handed_on(self, i: int) -> int | None:
        """A value from an earlier graph, before a graph break: batched where its size says so."""
        value = self.values[i]
        symbolic = [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
        if not symbolic or self.batch_size < 2:
            return None
        example = self.examples[i]
        for dim in symbolic:
            if example.shape[dim] == self.batch_size:
                return dim
        for dim in symbolic:
            if example.shape[dim] % self.batch_size == 0:
                user = next(iter(self.placeholders[i].users), self.placeholders[i])
                from fxgrad.context import source_line

                raise LostLayout(
                    f"a value that holds {example.shape[dim]} rows for {self.batch_size} samples crosses "
                    "a graph break, and where the samples are in it is lost there",
                    where=source_line(user),
                    advice="Give the samples a dimension of their own before the break.",
                )
        return None


def compile_graph(captured: Captured, options: Options, store: Store) -> Callable[..., Any]:
    """The callable that Dynamo runs in the graph's place."""
    trainable = captured.trainable()
    inner = inner_compiler(options.backend)
    if not trainable:
        return inner(captured.gm, captured.values)
    dims = captured.sample_dims()
    single = captured.batch_size == 1
    ctx = make_context(captured, options, dims, single=single)
    gm = run_passes(captured.gm, ctx, SINGLE if single else PASSES)
    uniform = uniform_outputs(gm)
    values, fakes = _inner_inputs(captured, trainable, dims)
    del fakes
    compiled = inner(gm, values)
    return Transformed(compiled, trainable, dims, uniform, store, captured.batch_size, options.fullgraph)


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
        raise OptionError("the graph has no input that holds samples")
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
        node.name: _own_input(value, dims.get(i), batch, translate, symbols)
        for i, (node, value) in enumerate(zip(captured.placeholders, captured.values, strict=True))
    }


def _own_input(value: Any, dim: int | None, batch: Any, translate: Any, symbols: Symbols) -> Any:
    if isinstance(value, torch.SymInt):
        return translate(value)
    if not isinstance(value, Tensor):
        return value
    sizes = [batch if d == dim else translate(size) for d, size in enumerate(value.shape)]
    parameter = isinstance(value, nn.Parameter) and value.requires_grad
    with symbols.mode:
        order = sorted(range(len(sizes)), key=lambda d: _stride_hint(value.stride(d)), reverse=True)
        dense = torch.empty([sizes[d] for d in order], dtype=value.dtype, device=value.device)
        own = dense.permute([order.index(d) for d in range(len(sizes))])
        return nn.Parameter(own) if parameter else own


def _stride_hint(stride: Any) -> int:
    return int(stride.node.hint) if isinstance(stride, torch.SymInt) else int(stride)


def _hint(captured: Captured) -> int:
    """A number of samples that no other size is mistaken for, with the real one's divisors."""
    return captured.batch_size * 1009


def _inner_inputs(
    captured: Captured, trainable: Sequence[int], dims: dict[int, int]
) -> tuple[list[Any], list[Any]]:
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
    return values + ghosts, ghosts


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
    dims: dict[int, int]
    uniform: Sequence[int]
    store: Store
    batch_size: int
    fullgraph: bool

    def __call__(self, *args: Any) -> Any:
        n = self._batch_size(args)
        parameters = [args[i] for i in self.trainable]
        ghosts = Ghosts.apply(self.store, n, *parameters)  # type: ignore[no-untyped-call]
        inputs = list(args)
        for i in self.trainable:
            inputs[i] = args[i].detach()
        outputs = list(self.compiled(*inputs, *ghosts))
        for i in self.uniform:
            outputs[i] = _Uniform.apply(outputs[i], ghosts[0])  # type: ignore[no-untyped-call]
        return outputs

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
