"""Sharing: fxgrad follows equal calls on equal operands once, so twelve layers cost little more than one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.fake import FunctionalTensor, writes_into
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.values import memories
from fxgrad.ops.written import writers_by_memory
from fxgrad.proof.calls import Origins
from fxgrad.proof.trials import Symbolic, symbols_in

_SMALL = 1 << 20  # the largest tensor of ids that fxgrad compares, in elements


class Written(Exception):
    """Raised when an op wrote to a value that may stand for several values."""


class Sharing:
    """A cache of the results of calls, keyed by everything that determines their origins.

    Equal values share one entry, so no op may write to them. Memory that the graph writes to is not shared, and a write
    that the graph does not show raises `Written`.
    """

    def __init__(self, graph: fx.Graph, symbols: Mapping[Any, int], *, off: bool = False) -> None:
        self.off = off
        self.symbols = symbols
        self.results: dict[Hashable, Any] = {}
        self.kinds: dict[Hashable, int] = {}  # the facts known of a value -> its kind, a number
        self.numbers: dict[int, tuple[Any, Origins, int]] = {}  # `id()` of a value -> the value, its origins, its kind
        self.written = set() if off else writers_by_memory(graph).keys() | _lengths(graph)

    def own(self, node: fx.Node) -> bool:
        """Decide whether a node's value must not be shared."""
        return self.off or not memories(node).isdisjoint(self.written)

    def kind(self, value: FunctionalTensor, origins: Origins) -> int | None:
        """Return the kind of a value, equal for values with equal facts; None for a value that is never shared."""
        if writes_into(value):
            return None  # an op wrote to it
        cached = self.numbers.get(id(value))
        if cached is not None and cached[1] is origins:
            return cached[2]
        if origins.blame or self.off:
            return None
        with disable_current_modes():
            if any(ids.numel() > _SMALL for ids in origins.ids):
                return None
            ids = tuple((tuple(tensor.shape), blake2b(tensor.numpy().tobytes()).digest()) for tensor in origins.ids)
        if not self.from_sizes(*value.shape):
            return None
        bounds = (tuple(sorted(origins.padded.items())), origins.least, origins.ends, id(origins.renormed))
        key = (form_of(value), ids, origins.traced, origins.counted, id(origins.known), origins.pack, bounds)
        number = self.kinds.setdefault(key, len(self.kinds))
        self.numbers[id(value)] = (value, origins, number)
        return number

    def from_sizes(self, *numbers: Any) -> bool:
        """Decide whether none of these numbers was read from data."""
        return symbols_in(numbers) <= self.symbols.keys()

    def key(self, n: fx.Node, args: Any, kind: Any) -> Hashable | None:
        """Return the cache key of a call; None if fxgrad cannot write one."""
        if self.own(n):
            return None
        try:
            operands = _key(args, kind)
            state = torch.is_grad_enabled(), *map(_autocast, ("cpu", "cuda"))
            key = (n.op, n.target, operands, TRACED.get(n), state)
            hash(key)
            return key
        except (_Unlike, TypeError):
            return None

    def check(self, n: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        """Raise `Written` if a call wrote to a value that others may share."""
        if self.off:
            return
        for node in n.all_input_nodes:
            for value in _tensors(env.get(node)):
                if writes_into(value) and not self.own(node):
                    raise Written(node.name)


def form_of(value: Tensor) -> Hashable:
    """Return a value's shape, memory layout, dtype and device."""
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
    return value.node.expr if isinstance(value, Symbolic) else value


def _tensors(value: Any) -> list[FunctionalTensor]:
    return [one for one in (value if isinstance(value, tuple | list) else [value]) if isinstance(one, FunctionalTensor)]


def _lengths(graph: fx.Graph) -> set[int | None]:
    """Return the storages of the lengths of packed sequences and of the integer tensors that they are made from.

    Packing adds facts to the origins of these tensors.
    """
    pack = torch.ops.fxgrad.pack
    packed = [node.args[1] for node in graph.nodes if node.target in (pack, pack.default)]
    lengths = set[int | None]()
    while packed:
        node = packed.pop()
        fake = FAKE.get(node) if isinstance(node, fx.Node) else None
        if isinstance(node, fx.Node) and isinstance(fake, Tensor) and not fake.dtype.is_floating_point:
            lengths |= memories(node)
            packed += node.all_input_nodes
    return lengths
