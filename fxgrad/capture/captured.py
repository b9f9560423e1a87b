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

from fxgrad.errors import BatchSizeError, LostLayout, OutsideGraph
from fxgrad.graph.context import source_line
from fxgrad.host.dynamo import source_of
from fxgrad.ops.facts import EXAMPLE
from fxgrad.samples.batch import LOST, PACKED_DATA, PACKED_ORDER, PACKED_SIZES, SHARED, counting_dim
from fxgrad.samples.recurrent_states import inputs_as_states

SAMPLE_DIM = "_fxgrad_sample_dim"  # on an input tensor, during a call: where it holds the samples
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
        self.values = [EXAMPLE.of(node) for node in self.placeholders]

    def trainable(self) -> list[int]:
        """The positions of trainable parameters among the inputs, in the model's own order, as far as it is known."""
        own = {parameter: place for place, parameter in enumerate(self.names)}
        found = [
            i for i, example in enumerate(self.examples) if isinstance(example, nn.Parameter) and example.requires_grad
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
            raise no_samples()
        return dims

    def counts(self, i: int) -> bool:
        """Whether an input is the number of samples in a tensor that the graph takes nothing else of."""
        source: Any = source_of(self.placeholders[i])
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
            if isinstance(example, Tensor) and not isinstance(example, nn.Parameter) and id(example) not in self.buffers
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
    source = source_of(node)
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
    source: Any = source_of(node)
    while hasattr(source, "base"):
        if "NNModule" in type(source).__name__:
            return False
        source = source.base
    return bool(getattr(source, "is_input", False))


def attribute_name(node: fx.Node) -> str:
    """The name of an attribute in the user's terms: ``L['original'].head.t`` is ``head.t``."""
    name = getattr(source_of(node), "name", node.name)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", str(name() if callable(name) else name))
    text = re.sub(r"^[LG]\['(?:original|self)'\]\.(?:__self__\.)?|^[LG]\['(\w+)'\]", r"\1", text)
    text = re.sub(r"^__import_\w+\.", "", text)  # a global of a module
    return re.sub(r"^(.*)\.__closure__\[\d+\]\.cell_contents", r"closure of \1", text)


def _attribute(node: fx.Node) -> str:
    """A parameter's name in its module: ``L['self']._modules['0']._parameters['weight']`` is ``0.weight``."""
    name = getattr(source_of(node), "name", "")
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


def no_samples() -> BatchSizeError:
    return BatchSizeError(
        "the model uses no input that holds samples: its parameters have no per-sample gradients",
        advice="Check which inputs hold samples, and name their dimensions with in_dims=.",
    )
