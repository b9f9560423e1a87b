"""One graph from TorchDynamo: its inputs, and what they are to the samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.errors import BatchSizeError, LostLayout, OptionError, OutsideGraph
from fxgrad.graph.context import source_line
from fxgrad.host.dynamo import source_of
from fxgrad.ops.facts import EXAMPLE
from fxgrad.samples.batch import LOST, PACKED_DATA, PACKED_ORDER, PACKED_SIZES, SHARED, counting_dim

SAMPLE_DIM = "_fxgrad_sample_dim"  # on an input tensor, during a call: where it holds the samples


@dataclass(frozen=True)
class Captured:
    """One graph from Dynamo: its inputs by their positions, and what they are to the samples, each computed once."""

    gm: fx.GraphModule
    examples: Sequence[Any]
    batch_size: int
    parameter_names: Mapping[int, str]  # id(parameter) -> the user's name, in the model's order; empty: not known
    fullgraph: bool
    buffers: frozenset[int] = frozenset()  # id(buffer)
    positional: Sequence[str] = ()  # the names of forward's positional arguments
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the call, by what Dynamo's names begin with

    @property
    def single(self) -> bool:
        return self.batch_size == 1

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return list(self.gm.graph.find_nodes(op="placeholder"))

    @cached_property
    def values(self) -> list[Any]:
        """Return the inputs as Dynamo traced them."""
        return [EXAMPLE.of(node) for node in self.placeholders]

    @cached_property
    def names(self) -> list[str]:
        """Return the user's names for the inputs: ``encoder.weight``, ``x``, ``batch['ids']``."""
        known = [self.parameter_names.get(id(example)) for example in self.examples]
        pairs = zip(known, self.placeholders, strict=True)
        return [input_name(node, self.positional) if name is None else name for name, node in pairs]

    @cached_property
    def parameters(self) -> list[int]:
        return [i for i, example in enumerate(self.examples) if isinstance(example, nn.Parameter)]

    @cached_property
    def trainable(self) -> dict[str, int]:
        """The positions of trainable parameters by their names, in the model's own order, as far as it is known."""
        order = {parameter: place for place, parameter in enumerate(self.parameter_names)}
        trainable = [i for i in self.parameters if self.examples[i].requires_grad]
        trainable.sort(key=lambda i: order.get(id(self.examples[i]), len(order)))
        return {self.names[i]: i for i in trainable}

    @cached_property
    def frozen(self) -> dict[int, str]:
        """Return the names of the other parameters, where a graph break may let one become trainable unseen."""
        trainable = self.trainable.values()
        return {} if self.fullgraph else {i: self.names[i] for i in self.parameters if i not in trainable}

    @cached_property
    def inputs(self) -> list[int]:
        """Return the positions of tensors that are neither parameters nor buffers."""
        tensors = [i for i, example in enumerate(self.examples) if isinstance(example, Tensor)]
        return [i for i in tensors if i not in self.parameters and id(self.examples[i]) not in self.buffers]

    @property
    def other_tensors(self) -> list[int]:
        """Return the positions of tensors that are no trainable parameters."""
        own = set(self.trainable.values())
        return [i for i, example in enumerate(self.examples) if isinstance(example, Tensor) and i not in own]

    @cached_property
    def roles(self) -> dict[int, int]:
        """Return the inputs' sample dimensions, or the constants in place of one."""
        return {i: self._role(i) for i in self.inputs}

    @cached_property
    def dims(self) -> dict[int, int]:
        """Return the sample dimensions of the inputs that have one; none of a batch of one."""
        return {} if self.single else self.sample_dims()

    @cached_property
    def packed(self) -> dict[int, tuple[int, int] | None]:
        """The inputs that are a PackedSequence's; the data's with the positions of batch_sizes and sorted_indices."""
        if self.single:
            return {}
        packed = {i: role for i, role in self.roles.items() if role in (PACKED_DATA, PACKED_SIZES, PACKED_ORDER)}
        return {i: self._fields_beside(i) if role == PACKED_DATA else None for i, role in packed.items()}

    def traced_inputs(self) -> set[str]:
        """Return the names in the graph of inputs and parameters that require a gradient."""
        pairs = zip(self.placeholders, self.examples, strict=True)
        return {node.name for node, example in pairs if isinstance(example, Tensor) and example.requires_grad}

    def described(self, i: int) -> str:
        """Return an input's kind and name, for errors."""
        if i in self.parameters:
            return f"parameter '{self.names[i]}'"
        node = self.placeholders[i]
        return f"input '{self.names[i]}'" if is_argument(node) else f"'{attribute_name(node)}'"

    def check_leaves(self) -> None:
        """Refuse tensors whose gradients no tap sees: neither arguments of the call nor the model's parameters."""
        for node, example in zip(self.placeholders, self.examples, strict=True):
            if not isinstance(example, Tensor) or not example.requires_grad:
                continue
            if not isinstance(example, nn.Parameter) and not is_argument(node):
                raise OutsideGraph(
                    f"'{attribute_name(node)}' requires a gradient and is neither a parameter nor an argument: "
                    "gradients that reach it are no sample's",
                    where=_first_use(node),
                    advice="Compute it in forward, from parameters, or detach it; or make it an nn.Parameter.",
                )
            if isinstance(example, nn.Parameter) and self.parameter_names and id(example) not in self.parameter_names:
                raise OutsideGraph(
                    f"'{attribute_name(node)}' is a Parameter that model.parameters() does not have",
                    where=_first_use(node),
                    advice="Register it: as an attribute of a module, in an nn.ParameterList or nn.ParameterDict, or "
                    "its layer in an nn.ModuleList or nn.ModuleDict: a plain list, a closure and a global are none of "
                    "these. As an argument pass a tensor, such as p.detach().",
                )

    def check_objects(self) -> None:
        """Refuse tensors as long as the batch in what no call looks into: nobody said what they hold."""
        for i, role in self.roles.items():
            shape, node = self.examples[i].shape, self.placeholders[i]
            unseen = role == SHARED and getattr(self.examples[i], SAMPLE_DIM, None) is None  # in_dims= marks it
            if not unseen or not is_argument(node):
                continue
            if any(shape[d : d + 1] == (self.batch_size,) for d in {*self.dims.values()}):
                raise LostLayout(
                    f"input '{self.names[i]}' is as long as the batch, and in an object that fxgrad does not look "
                    "into: it would count as one value for all samples",
                    where=_first_use(node),
                    advice="Pass it by itself, or in a list, tuple, dict or dataclass, and make the object inside "
                    "forward. A table for all samples is passed by itself, with in_dims= None for it.",
                )

    def check_negated(self) -> None:
        """Refuse negated views: Inductor and kernels read their memory, which has the values with the other sign."""
        for name, node, example in zip(self.names, self.placeholders, self.examples, strict=True):
            if isinstance(example, Tensor) and example.is_neg():
                known = is_argument(node) or isinstance(example, nn.Parameter)
                raise OptionError(
                    f"'{name if known else attribute_name(node)}' is a negated view, as z.conj().imag makes one: "
                    "compiled code would read its numbers with the other sign",
                    where=_first_use(node),
                    advice="Write it out by .resolve_neg().",
                )

    def aliases(self) -> dict[str, str]:
        """Every name of a parameter, and the one it goes by here: where Dynamo knows no better, ``l_self_..``."""
        attributes = [_attribute(self.placeholders[i]) for i in self.parameters]
        pairs = zip(attributes, self.parameters, strict=True)
        unique = {attribute: self.names[i] for attribute, i in pairs if attributes.count(attribute) == 1}
        return unique | {self.names[i]: self.names[i] for i in self.parameters}

    def sample_dims(self) -> dict[int, int]:
        """Return the sample dimensions of the inputs that have one."""
        lost = next((i for i, role in self.roles.items() if role == LOST), None)
        if lost is not None:
            shape = ", ".join(map(str, self.examples[lost].shape))
            raise LostLayout(
                f"where the {self.batch_size} samples are in a value of shape [{shape}] is lost at a graph break",
                where=_first_use(self.placeholders[lost]),
                advice="Give the samples a dimension of their own before the break.",
            )
        return {i: dim for i, role in self.roles.items() if (dim := counting_dim(role)) is not None}

    def held(self) -> dict[int, int]:
        """Return the inputs that hold the sample of a batch of one: all of each is the sample's."""
        dims = {i: 0 for i, role in self.roles.items() if role != SHARED}
        if not dims:
            raise no_samples()
        return dims

    def counts(self, i: int) -> bool:
        """Return whether an input is the number of samples in a tensor that the graph takes nothing else of."""
        source: Any = source_of(self.placeholders[i])
        if not isinstance(self.values[i], torch.SymInt) or not hasattr(source, "base"):
            return False
        role = getattr(self._argument(_path(source.base)), SAMPLE_DIM, None)
        return role is not None and role != LOST and counting_dim(role) == getattr(source, "idx", None) is not None

    def traced(self, i: int) -> bool:
        """Return whether a parameter's gradient flows into an input: an earlier graph's output may carry it."""
        return not self.fullgraph and bool(self.values[i].requires_grad)

    def _role(self, i: int) -> int:
        """Return the mark of a user's input or of an earlier graph's output; else the input's size decides."""
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

    def _fields_beside(self, i: int) -> tuple[int, int]:
        """Return the positions of batch_sizes and sorted_indices of the PackedSequence whose data an input is."""
        base = self.names[i].removesuffix(".data").removesuffix("[0]")
        places = {self.names[k].removeprefix(base): k for k in self.inputs if self.names[k].startswith(base)}
        sizes = places.get(".batch_sizes", places.get("[1]"))  # as Dynamo names them
        order = places.get(".sorted_indices", places.get("[2]"))
        if sizes is None or order is None:
            raise LostLayout(
                f"which sample a row of {base}.data belongs to is lost: the model reads it without batch_sizes and "
                "sorted_indices",
                where=_first_use(self.placeholders[i]),
                advice="Pad it with pad_packed_sequence, or pass on all fields: PackedSequence(f(p.data), *p[1:]).",
            )
        return sizes, order

    def _argument(self, path: str) -> Any:
        """Return the value that Dynamo calls ``L['args'][1]['y']``; None where it is reached in another way."""
        match = re.fullmatch(r"L\['(args|kwargs)'\]((?:\[(?:\d+|'[^']*')\])*)", path)
        value: Any = self.arguments.get(match[1]) if match else None
        for number, key in re.findall(r"\[(?:(\d+)|'([^']*)')\]", match[2] if match else ""):
            try:
                value = value[int(number) if number else key]
            except (LookupError, TypeError):
                return None
        return value


def _first_use(node: fx.Node) -> str:
    """Return the user's line that first reads an input."""
    return source_line(next(iter(node.users), node))


def _path(source: Any) -> str:
    """Dynamo's name of an input, such as ``L['args'][0]``: a method, or an attribute in later releases."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def input_name(node: fx.Node, positional: Sequence[str]) -> str:
    """Return the name of a graph input in terms of forward's arguments: ``L['args'][1]['y']`` is ``y['y']``."""
    path = _path(source_of(node))
    if match := re.fullmatch(r"L\['args'\]\[(\d+)\](.*)", path):
        i = int(match[1])
        return (positional[i] if i < len(positional) else f"args[{i}]") + match[2]
    match = re.fullmatch(r"L\['kwargs'\]\['(\w+)'\](.*)", path)
    return match[1] + match[2] if match else node.name


def is_argument(node: fx.Node) -> bool:
    """Whether a graph input is one of the call's arguments: no attribute of a module, no global, no closure's."""
    source: Any = source_of(node)
    while hasattr(source, "base"):
        if "NNModule" in type(source).__name__:
            return False
        source = source.base
    return bool(getattr(source, "is_input", False))


def attribute_name(node: fx.Node) -> str:
    """Return the name of an attribute in the user's terms: ``L['original'].head.t`` is ``head.t``."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", _path(source_of(node)) or node.name)
    text = re.sub(r"^[LG]\['(?:original|self)'\]\.(?:__self__\.)?|^[LG]\['(\w+)'\]", r"\1", text)
    text = re.sub(r"^__import_\w+\.", "", text)  # a global of a module
    return re.sub(r"^(.*)\.__closure__\[\d+\]\.cell_contents", r"closure of \1", text)


def _attribute(node: fx.Node) -> str:
    """Return a parameter's name in its module: ``L['self']._modules['0']._parameters['weight']`` is ``0.weight``."""
    return ".".join(re.findall(r"\._(?:modules|parameters)\['([^']+)'\]", _path(source_of(node))))


def no_samples() -> BatchSizeError:
    return BatchSizeError(
        "the model uses no input that holds samples: its parameters have no per-sample gradients",
        advice="Check which inputs hold samples, and name their dimensions with in_dims=.",
    )
