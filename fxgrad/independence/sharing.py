"""Calls that are alike, on operands that are alike, are followed once: twelve layers cost little more than one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from fxgrad.independence.calls import Origins

_SMALL = 1 << 20  # ids of more elements than that are not compared


class Written(Exception):
    """Something that may stand for several values was written to."""


class Sharing:
    """What calls returned, by all that decides what is known of it.

    Values that are alike are one value here. So nothing may write to them: memory that the graph writes to is left out,
    and a write that the graph does not show raises `Written`.
    """

    def __init__(self, graph: fx.Graph, symbols: Mapping[Any, int], *, off: bool = False) -> None:
        self.off = off
        self.symbols = symbols
        self.results: dict[Hashable, Any] = {}
        self.kinds: dict[Hashable, int] = {}  # what is known of a value -> a number
        self.numbers: dict[int, tuple[Any, Origins, int]] = {}  # the id of a value -> it, and the number of its kind
        self.written = set() if off else _written(graph) | _lengths(graph)

    def own(self, node: fx.Node) -> bool:
        """Whether a node's value has to be its own."""
        return self.off or bool(_memory([node]) & self.written)

    def kind(self, value: FunctionalTensor, origins: Origins) -> int | None:
        """A number for all values of which the same is known; None for those that are like no other."""
        if torch._functionalize_mutation_counter(value.elem):
            return None  # it is not what it was
        kept = self.numbers.get(id(value))
        if kept is not None and kept[1] is origins:
            return kept[2]
        if origins.blame or self.off:
            return None
        with _disable_current_modes():
            if any(ids.numel() > _SMALL for ids in origins.ids):
                return None
            ids = tuple((tuple(one.shape), blake2b(one.numpy().tobytes()).digest()) for one in origins.ids)
        if not self.from_sizes(*value.shape):
            return None
        known = None if origins.known is None else id(origins.known)
        padded = tuple(sorted(origins.padded.items()))
        bounds = (padded, origins.least, origins.ends, None if origins.renormed is None else id(origins.renormed))
        key = (form_of(value), ids, origins.traced, origins.counted, known, origins.pack, bounds)
        number = self.kinds.setdefault(key, len(self.kinds))
        self.numbers[id(value)] = (value, origins, number)
        return number

    def from_sizes(self, *numbers: Any) -> bool:
        """Whether none of these is read from data."""
        symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
        free = [number.node.expr.free_symbols for number in numbers if isinstance(number, symbolic)]
        return all(symbol in self.symbols for symbols in free for symbol in symbols)

    def key(self, n: fx.Node, args: Any, kind: Any) -> Hashable | None:
        """All that decides what is known of a call's result; None where that is more than can be said."""
        if self.off or self.own(n):
            return None
        try:
            operands = _key(args, kind)
            state = torch.is_grad_enabled(), *((_autocast(device)) for device in ("cpu", "cuda"))
            key = (n.op, n.target, operands, n.meta.get("traced"), state)
            hash(key)
        except (_Unlike, TypeError):
            return None
        return key

    def check(self, n: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Raise where a call wrote to what others may share."""
        if self.off:
            return
        for node in n.all_input_nodes:
            for value in _tensors(env.get(node)):
                if torch._functionalize_mutation_counter(value.elem) and not self.own(node):
                    raise Written(node.name)


def form_of(value: Tensor) -> Hashable:
    """Shape, layout in memory, dtype and device."""
    sizes = tuple(_plain(size) for size in (*value.shape, *value.stride(), value.storage_offset()))
    return sizes, value.dim(), value.dtype, value.device, value.requires_grad


class _Unlike(Exception):
    """An argument that is like no other."""


def _autocast(device: str) -> Any:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _key(arg: Any, kind: Any) -> Hashable:
    if isinstance(arg, FunctionalTensor):
        number = kind(arg)
        if number is None:
            raise _Unlike
        return ("tensor", number)
    if isinstance(arg, Tensor):
        raise _Unlike
    if isinstance(arg, tuple | list):
        return type(arg).__name__, *(_key(one, kind) for one in arg)
    if isinstance(arg, dict):
        return tuple((name, _key(one, kind)) for name, one in arg.items())
    if isinstance(arg, slice):
        return "slice", _key(arg.start, kind), _key(arg.stop, kind), _key(arg.step, kind)
    return type(arg).__name__, _plain(arg)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return value


def _tensors(value: Any) -> list[FunctionalTensor]:
    return [one for one in (value if isinstance(value, tuple | list) else [value]) if isinstance(one, FunctionalTensor)]


def _written(graph: fx.Graph) -> set[int]:
    """The memory that calls in place and `out=` write to."""
    found = set()
    for node in graph.nodes:
        call = node.meta.get("call")
        if call is not None and (call.inplace or call.get("out") is not None):
            found |= _memory([*node.all_input_nodes, node])
    return found


def _lengths(graph: fx.Graph) -> set[int]:
    """The memory of lengths by which something is packed, and of what they are casts of: more is known of it then."""
    pack = torch.ops.fxgrad.pack
    packed = [node.args[1] for node in graph.nodes if node.target in (pack, pack.default)]
    found = set()
    while packed:
        node = packed.pop()
        fake = node.meta.get("fake") if isinstance(node, fx.Node) else None
        if isinstance(node, fx.Node) and isinstance(fake, Tensor) and not fake.dtype.is_floating_point:
            found |= _memory([node])
            packed += node.all_input_nodes
    return found


def _memory(nodes: Iterable[fx.Node]) -> set[int]:
    fakes = [fake for node in nodes for fake in torch.utils._pytree.tree_leaves(node.meta.get("fake"))]
    return {fake.untyped_storage()._cdata for fake in fakes if isinstance(fake, Tensor)}
