"""One graph from TorchDynamo: its inputs, what they are to the samples, and the passes' own view of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.batch import LOST, PACKED_DATA, PACKED_ORDER, PACKED_SIZES, SHARED, counting_dim
from fxgrad.context import Context, TrainableParameter, source_line
from fxgrad.errors import BatchSizeError, LostLayout, OutsideGraph
from fxgrad.options import Options
from fxgrad.recurrent.states import inputs_as_states
from fxgrad.samples.symbols import Symbols, expression, hint

SAMPLE_DIM = "_fxgrad_sample_dim"  # on an input tensor, during a call: where it holds the samples
UNLIKELY = 7  # the length that a size is taken to have of which nothing is known: no other size should be
_CALL: ContextVar[dict[str, Any]] = ContextVar("call")  # what Dynamo's names of inputs begin with


@contextlib.contextmanager
def called_with(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[None]:
    """The user's arguments, as long as the call lasts: a size may be all that a graph takes of one."""
    token = _CALL.set({"args": args, "kwargs": kwargs})
    try:
        yield
    finally:
        _CALL.reset(token)


@dataclass
class Captured:
    """One graph from Dynamo: its inputs, and what they are to the samples."""

    gm: fx.GraphModule
    examples: Sequence[Any]
    batch_size: int
    names: dict[int, str]  # id(parameter) -> the user's name, in the model's order
    fullgraph: bool = True
    buffers: frozenset[int] = frozenset()  # id(buffer)
    positional: Sequence[str] = ()  # the names of forward's positional arguments

    def __post_init__(self) -> None:
        self.placeholders = self.gm.graph.find_nodes(op="placeholder")
        self.values = [node.meta["example_value"] for node in self.placeholders]

    def trainable(self) -> list[int]:
        """The positions of trainable parameters among the inputs, in the model's own order, as far as it is known."""
        own = {parameter: place for place, parameter in enumerate(self.names)}
        found = [
            i
            for i, example in enumerate(self.examples)
            if isinstance(example, nn.Parameter) and example.requires_grad
        ]
        return sorted(found, key=lambda i: own.get(id(self.examples[i]), len(own)))

    def frozen(self) -> dict[int, str]:
        """The positions of the other parameters, with their names."""
        own = {i for i, example in enumerate(self.examples) if isinstance(example, nn.Parameter)}
        return {i: self.name(i) for i in own.difference(self.trainable())}

    def check_leaves(self) -> None:
        """Refuse tensors whose gradients no tap sees: neither arguments of the call nor the model's parameters."""
        for node, example in zip(self.placeholders, self.examples, strict=True):
            if not isinstance(example, Tensor) or not example.requires_grad:
                continue
            where = source_line(next(iter(node.users), node))
            if not isinstance(example, nn.Parameter) and is_argument(node):
                continue
            if not isinstance(example, nn.Parameter):
                raise OutsideGraph(
                    f"'{attribute_name(node)}' requires a gradient and is neither a parameter nor an argument: "
                    "gradients that reach it are no sample's",
                    where=where,
                    advice="Compute it in forward, from parameters, or detach it; or make it an nn.Parameter.",
                )
            if self.names and id(example) not in self.names:
                raise OutsideGraph(
                    f"'{attribute_name(node)}' is a Parameter that model.parameters() does not have",
                    where=where,
                    advice="Register it: as an attribute of a module, in an nn.ParameterList or nn.ParameterDict, or "
                    "its layer in an nn.ModuleList or nn.ModuleDict: a plain list, a closure and a global are none of "
                    "these. As an argument pass a tensor, such as p.detach().",
                )

    def name(self, i: int) -> str:
        """The user's name for an input: ``encoder.weight``, ``x``, ``batch['ids']``."""
        known = self.names.get(id(self.examples[i]))
        return known if known is not None else input_name(self.placeholders[i], self.positional)

    def parameter_names(self) -> dict[str, str]:
        """Every name of a parameter, and the one it goes by here: where Dynamo knows no better, ``l_self_..``."""
        own = [i for i, example in enumerate(self.examples) if isinstance(example, nn.Parameter)]
        attributes = [_attribute(self.placeholders[i]) for i in own]
        known = zip(attributes, own, strict=True)
        found = {attribute: self.name(i) for attribute, i in known if attributes.count(attribute) == 1}
        return found | {self.name(i): self.name(i) for i in own}

    def sample_dims(self) -> dict[int, int]:
        """Input position -> sample dimension."""
        dims = {}
        for i in self.inputs():
            dim = self._role(i)
            if dim == LOST:
                raise self._lost(i)
            counted = counting_dim(dim)
            if counted is not None:
                dims[i] = counted
        return dims

    def held(self) -> dict[int, int]:
        """The inputs that hold the sample of a batch of one: all of each is the sample's."""
        dims = {i: 0 for i in self.inputs() if self._role(i) != SHARED}
        if not dims:
            raise _no_samples()
        return dims

    def counts(self, i: int) -> bool:
        """Whether an input is the number of samples in a tensor that the graph takes nothing else of."""
        source: Any = getattr(self.placeholders[i], "_dynamo_source", None)
        if not isinstance(self.values[i], torch.SymInt) or not hasattr(source, "base"):
            return False
        role = getattr(_named(source.base), SAMPLE_DIM, None)
        return role is not None and role != LOST and counting_dim(role) == getattr(source, "idx", None) is not None

    def packed(self) -> dict[int, tuple[int, int] | None]:
        """The inputs that are a PackedSequence's; the data's with the positions of batch_sizes and sorted_indices."""
        found: dict[int, tuple[int, int] | None] = {}
        places = {self.name(i): i for i in self.inputs()}
        for i in self.inputs():
            role = self._role(i)
            if role in (PACKED_DATA, PACKED_SIZES, PACKED_ORDER):
                found[i] = None
            if role == PACKED_DATA:
                base = self.name(i).removesuffix(".data").removesuffix("[0]")
                sizes, order = ([places.get(base + form) for form in forms] for forms in _FIELDS)
                known = [next((place for place in field if place is not None), None) for field in (sizes, order)]
                if known[0] is None or known[1] is None:
                    raise LostLayout(
                        f"which sample a row of {base}.data belongs to is lost: the model reads the data alone",
                        where=source_line(next(iter(self.placeholders[i].users), self.placeholders[i])),
                        advice="Pad it with pad_packed_sequence, or return it as a PackedSequence.",
                    )
                found[i] = (known[0], known[1])
        return found

    def states(self) -> list[int]:
        """The inputs that recurrent layers start from."""
        states = inputs_as_states(self.gm)
        return [i for i in self.inputs() if self.placeholders[i] in states]

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


_FIELDS = ((".batch_sizes", "[1]"), (".sorted_indices", "[2]"))  # as Dynamo names them


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


def is_argument(node: fx.Node) -> bool:
    """Whether a graph input is one of the call's arguments: no attribute of a module, no global, no closure's."""
    source: Any = getattr(node, "_dynamo_source", None)
    while hasattr(source, "base"):
        if "NNModule" in type(source).__name__:
            return False
        source = source.base
    return bool(getattr(source, "is_input", False))


def attribute_name(node: fx.Node) -> str:
    """The name of an attribute in the user's terms: ``L['original'].head.t`` is ``head.t``."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", node.name)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", str(name() if callable(name) else name))
    text = re.sub(r"^[LG]\['(?:original|self)'\]\.(?:__self__\.)?|^[LG]\['(\w+)'\]", r"\1", text)
    text = re.sub(r"^__import_\w+\.", "", text)  # a global of a module
    return re.sub(r"^(.*)\.__closure__\[\d+\]\.cell_contents", r"closure of \1", text)


def _attribute(node: fx.Node) -> str:
    """A parameter's name in its module: ``L['self']._modules['0']._parameters['weight']`` is ``0.weight``."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    text = str(name() if callable(name) else name)
    return ".".join(re.findall(r"\._(?:modules|parameters)\['([^']+)'\]", text))


def _named(source: Any) -> Any:
    """The value that Dynamo calls ``L['args'][1]['y']``; None where it is reached in another way."""
    name = getattr(source, "name", None)
    found = re.fullmatch(r"L\['(args|kwargs)'\]((?:\[(?:\d+|'[^']*')\])*)", str(name() if callable(name) else name))
    value: Any = _CALL.get({}).get(found[1]) if found else None
    for number, key in re.findall(r"\[(?:(\d+)|'([^']*)')\]", found[2] if found else ""):
        try:
            value = value[int(number) if number else key]
        except (LookupError, TypeError):
            return None
    return value


def make_context(
    captured: Captured, options: Options, dims: dict[int, int], *, single: bool = False
) -> Context:
    """The passes' context: their own symbols, and the inputs as fake values in them."""
    symbols = Symbols()
    placeholders = captured.placeholders
    parameters = [
        TrainableParameter(placeholders[i].name, captured.name(i), tuple(example.shape), example.dtype)
        for i, example in ((i, captured.examples[i]) for i in captured.trainable())
    ]
    packed = {} if single else captured.packed()
    inputs = {} if single and not dims else _own_inputs(captured, symbols, dims, packed, single)
    size = captured.batch_size
    return Context(
        symbols,
        inputs,
        parameters,
        {placeholders[i].name: dim for i, dim in dims.items()},
        options.quantities,
        options.loss_scale,
        options.mixing,
        {placeholders[i].name: captured.name(i) for i in range(len(placeholders))},
        {
            placeholders[i].name: None if rows is None else (placeholders[rows[0]].name, placeholders[rows[1]].name)
            for i, rows in packed.items()
        },
        single=single,
        may_mix=options.takes(mixing="allow"),
        ways=options.ways(next((p.device for p in captured.examples if isinstance(p, nn.Parameter)), None), size),
    )


def _no_samples() -> BatchSizeError:
    return BatchSizeError(
        "the model uses no input that holds samples: its parameters have no per-sample gradients",
        advice="Check which inputs hold samples, and name their dimensions with in_dims=.",
    )


def _own_inputs(
    captured: Captured,
    symbols: Symbols,
    dims: dict[int, int],
    packed: dict[int, tuple[int, int] | None],
    single: bool,
) -> dict[str, Any]:
    """Fake inputs in which the sample dims, and they alone, carry B; of a batch of one, none do."""
    if not dims:
        raise _no_samples()
    batch = symbols.batch(hint=_hint(captured))
    known: dict[Any, Any] = {}
    for i, dim in dims.items():
        size = 1 if single else captured.values[i].shape[dim]
        if isinstance(size, torch.SymInt):
            known[expression(size)] = batch
    known |= {expression(size): batch for i, size in enumerate(captured.values) if captured.counts(i)}

    def translate(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = expression(size)
        if expr not in known:
            likely = size.node.hint if size.node.hint is not None else UNLIKELY
            known[expr] = symbols.new(f"T{len(known)}", likely)
        return known[expr]

    for i, rows in packed.items():
        if rows is not None:
            symbols.count_rows(translate(captured.values[i].shape[0]))
    at = {} if single else dims
    return {
        node.name: _own_input(value, at.get(i), batch, translate, symbols, traced=i in dims and captured.traced(i))
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
        order = sorted(range(len(sizes)), key=lambda d: hint(value.stride(d)), reverse=True)
        dense = torch.empty([sizes[d] for d in order], dtype=value.dtype, device=value.device)
        own = dense.permute([order.index(d) for d in range(len(sizes))])
        if traced:
            return own.requires_grad_().clone()  # no leaf: the graph may change it in place
        return nn.Parameter(own) if parameter else own


def _hint(captured: Captured) -> int:
    """A number of samples that no other size is mistaken for, with the real one's divisors."""
    return captured.batch_size * 1009
