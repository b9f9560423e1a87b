"""Replay: run a movement op on a tensor of sample ids and read the layout of its result.

A movement op (view, permute, chunk, index, cat, ...) copies values without reading them. fxgrad runs it on small
integers that name samples, at two batch sizes, and reads the layout from the result. The ids are 1..B; 0 stands for an
element of no sample (a constant, padding). `thresholds` chooses the two sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.ops.calls import CALL, Call, map_nodes, op_name
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import RANDOM
from fxgrad.ops.forms import SHAPED_AS
from fxgrad.ops.values import memory_of, tensors_of
from fxgrad.ops.written import writers_by_memory
from fxgrad.samples.ids import read_copies, read_layout, read_written, sample_ids
from fxgrad.samples.layouts import Kind, Layout, kind_of, layout_of
from fxgrad.samples.symbols import Symbols, expression
from fxgrad.samples.thresholds import BATCHES, Batches, Thresholds


class Replay:
    """The replay of single nodes on sample ids, at given batch sizes."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self.thresholds = Thresholds(symbols, self.constant)
        self.constants: dict[tuple[fx.Node, int], Tensor] = {}
        self.written: dict[fx.Graph, set[int | None]] = {}  # the memory that each graph's ops write to

    def layouts(
        self, node: fx.Node, outputs: Sequence[Any], lined_up: Mapping[fx.Node, Layout] | None = None
    ) -> list[Layout | None]:
        """Return the layout of each output tensor of a movement op; None for one without.

        An op that fails on two or three samples (it takes rows 2 to 4) has none either. ``lined_up`` names constants
        with one row per sample.
        """
        try:
            return self._layouts(node, outputs, lined_up or {})
        except (RuntimeError, IndexError, ValueError):
            return [None] * len(outputs)

    def _layouts(
        self, node: fx.Node, outputs: Sequence[Any], lined_up: Mapping[fx.Node, Layout]
    ) -> list[Layout | None]:
        batches = self.thresholds.batches(node)
        if batches is None:
            return [None] * len(outputs)
        packed = [arg for arg in node.all_input_nodes if (layout := layout_of(arg)) and layout.rows]
        if packed:
            return self._packed(node, packed, len(outputs))
        if op_name(node.target) in _INDEXING:
            return [self._indexed(node, outputs[0], batches)]
        runs = []
        for batch in batches:
            known = {arg: self.ids(layout, arg, batch) for arg, layout in lined_up.items()}
            runs.append(_several(self._run(node, batch, known=known)))
        reader = self._reader(node)
        return [self.read(column, out, reader, batches) for *column, out in zip(*runs, outputs, strict=True)]

    def _reader(self, node: fx.Node) -> Any:
        """Return the function that reads the layout; it checks that a parameter's value is written to every sample."""
        uniform = any(kind_of(arg) is Kind.UNIFORM for arg in node.all_input_nodes)
        return read_written if uniform and op_name(node.target) in _WRITES else read_layout

    def ids(self, layout: Layout, node: fx.Node, batch: int) -> Tensor:
        """Return sample ids in place of a node's value, placed by a layout."""
        return sample_ids(layout, self.symbols.shape(FAKE.of(node), batch), batch)

    def _packed(self, node: fx.Node, packed: list[fx.Node], outputs: int) -> list[Layout | None]:
        """Return the layouts of packed data after an op; None unless its rows keep their content and order."""
        first, *others = filter(None, map(layout_of, packed))
        batched = [arg for arg in node.all_input_nodes if kind_of(arg) is Kind.BATCHED]
        if batched != packed or any(other.at(0) != first.at(0) for other in others):
            return [None] * outputs
        rows = self.symbols.evaluate(FAKE.of(packed[0]).shape[first.dim], BATCHES[0])
        moved = [read_layout(ids, rows) for ids in _several(self._run(node, BATCHES[0]))]
        return [first.at(one[0]) if one is not None and one[1:] == (1, 1) else None for one in moved]

    def _indexed(self, node: fx.Node, output: Tensor, batches: Batches) -> Layout | None:
        """Return the layout of ``x[ids]``; x and each batched index must lead to the same one."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        indices = [arg for arg in node.all_input_nodes if isinstance(FAKE.of(arg), Tensor) and arg is not source]
        runs = [[self._probe(node, arg, b) for b in batches] for arg in indices if kind_of(arg) is Kind.BATCHED]
        if kind_of(source) is Kind.BATCHED:
            runs.append([self._run(node, batch) for batch in batches])
        layouts = {self.read(run, output, batches=batches) for run in runs}
        return layouts.pop() if len(layouts) == 1 else None

    def read_back(self, node: fx.Node) -> tuple[Layout | None, int]:
        """Return layout and rank of ``x[indices]``, the elements that ``index_put_(x, indices, v)`` writes to."""
        source, indices = (CALL.of(node).arguments[name] for name in ("input", "indices"))
        scratch = fx.Graph()
        reading = scratch.call_function(torch.ops.aten.index.Tensor, (source, indices))
        try:
            with self.symbols.mode:
                output = reading.target(*fx.map_arg(reading.args, lambda arg: FAKE.of(arg)))  # type: ignore[operator]
            return self.layouts(reading, [output])[0], output.dim()
        finally:
            scratch.erase_node(reading)

    def _probe(self, node: fx.Node, index: fx.Node, batch: int) -> Any:
        """Index a table of positions by sample ids; the result is the ids of the index in the output."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dim, layout = _indexed_dim(node, index), layout_of(index)
        shape = self.symbols.shape(FAKE.of(source), batch)
        shape[dim] = batch + 1
        positions = torch.arange(batch + 1, dtype=torch.int32)
        probe = positions.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        assert layout is not None
        return self._run(node, batch, known={source: probe, index: self.ids(layout, index, batch).long()})

    def copies(self, node: fx.Node, output: Tensor, dim: int) -> Layout | None:
        """Return the layout of a parameter's value that a movement op copied to each sample."""
        batches = self.thresholds.batches(node)
        if batches is None:
            return None
        splits = [read_copies(self._run(node, batch, elements=True), dim, batch) for batch in batches]
        return self._agreed(splits, output)

    def keeps_rows(self, node: fx.Node, rows: fx.Node) -> bool:
        """Decide whether a movement op keeps the order of this operand along its sample dim."""
        (dim,) = self.symbols.batch_dims(FAKE.of(rows).shape)
        batches = self.thresholds.batches(node)
        if batches is None:
            return False
        for batch in batches:
            shape = self.symbols.shape(FAKE.of(rows), batch)
            moved = self._run(node, batch, known={rows: sample_ids(Layout(dim), shape, shape[dim])})
            layout = read_layout(moved, shape[dim])
            if layout is None or layout[1:] != (1, 1):
                return False
        return True

    def read(
        self, runs: list[Any], output: Any, reader: Any = read_layout, batches: Batches = BATCHES
    ) -> Layout | None:
        """Return the layout shown by the results of both replays; None if they show none or disagree."""
        if not isinstance(output, Tensor):
            return None
        if any(list(run.shape) != self.symbols.shape(output, batch) for run, batch in zip(runs, batches, strict=True)):
            return None
        layouts = [reader(run, batch) for run, batch in zip(runs, batches, strict=True)]
        return self._agreed(layouts, output)

    def _agreed(self, layouts: list[Any], output: Tensor) -> Layout | None:
        if layouts[0] is None or layouts[0] != layouts[1]:
            return None
        dim, outer, inner = layouts[0]
        rest = sympy.simplify(expression(output.shape[dim]) / self.symbols.symbol)
        if self.symbols.symbol in rest.free_symbols:
            return None
        if rest.is_Integer:
            return Layout(dim, outer, inner)
        # the merge has another symbolic size; a layout can name it only as a single factor
        if outer == 1:
            return Layout(dim, 1, None)
        return Layout(dim, None, 1) if inner == 1 else None

    def _run(
        self, node: fx.Node, batch: int, *, elements: bool = False, known: Mapping[fx.Node, Tensor] | None = None
    ) -> Any:
        indices = node.all_input_nodes if op_name(node.target) in _INDEXING else []

        def value(arg: fx.Node) -> Any:
            if known is not None and arg in known:
                return known[arg]
            if arg in indices and arg is not node.args[0] and isinstance(FAKE.of(arg), Tensor):
                return self.constant(arg, batch)
            return self._value(arg, batch, elements)

        args, kwargs = map_nodes((node.args, dict(node.kwargs)), value)
        return _call_on_ids(node, list(args), kwargs)

    def _value(self, node: fx.Node, batch: int, elements: bool) -> Any:
        fake = FAKE.of(node)
        if isinstance(fake, Tensor):
            layout, shape = layout_of(node), self.symbols.shape(fake, batch)
            if layout is not None and not elements:
                return sample_ids(layout, shape, batch)
            if elements and kind_of(node) is Kind.UNIFORM:
                return torch.arange(1, math.prod(shape) + 1, dtype=torch.int32).view(shape)
            return torch.zeros((), dtype=torch.int32).expand(shape)
        if tensors_of(fake):
            return self._run(node, batch, elements=elements)
        return self.symbols.evaluate_all(fake, batch)

    def constant(self, node: fx.Node, batch: int) -> Tensor:
        """Return the value of a constant made only of sizes; zeros for any other constant."""
        key = (node, batch)
        if key not in self.constants:
            try:
                self.constants[key] = self._computed(node, batch)
            except _UnknownData:
                fake = FAKE.of(node)
                self.constants[key] = torch.zeros(self.symbols.shape(fake, batch), dtype=fake.dtype)
        return self.constants[key]

    def _computed(self, node: fx.Node, batch: int) -> Tensor:
        if node.op not in ("call_function", "call_method") or self.changes(node) or kind_of(node) is not Kind.CONSTANT:
            raise _UnknownData

        def value(arg: fx.Node) -> Any:
            fake = FAKE.of(arg)
            if not isinstance(fake, Tensor):
                return self.symbols.evaluate_all(fake, batch)
            if op_name(node.target) in SHAPED_AS and arg is not node.args[0]:
                return torch.empty(self.symbols.shape(fake, batch))
            if fake.is_floating_point() or fake.is_complex():
                raise _UnknownData
            return self._computed(arg, batch)

        args, kwargs = map_nodes((node.args, dict(node.kwargs)), value)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if op_name(node.target) in _ORDERS and _has_ties(args[0], CALL.of(node)):
            raise _UnknownData
        result = _call(node, args, kwargs)
        if not isinstance(result, Tensor):
            raise _UnknownData
        return result

    def changes(self, node: fx.Node) -> bool:
        """Decide whether a value is random or overwritten in place; a replay repeats neither."""
        if node.graph not in self.written:
            self.written[node.graph] = set(writers_by_memory(node.graph))
        name = op_name(node.target)
        return name.endswith("_") or name in RANDOM or memory_of(FAKE.of(node)) in self.written[node.graph]


class _UnknownData(Exception):
    """Raised for a constant that depends on the user's data."""


_ORDERS = frozenset({"argsort", "sort", "topk", "kthvalue", "mode", "median"})


def _has_ties(values: Tensor, call: Call) -> bool:
    """Decide whether ties leave the order of an unstable sort open; it may change with the batch size."""
    if call.get("stable") is True or values.dim() == 0:
        return False
    dim = call.get("dim")
    ordered = values.sort(-1 if dim is None else dim).values
    return bool((ordered.diff(dim=-1 if dim is None else dim) == 0).any())


_NEEDS_MEMORY = frozenset("repeat_interleave pixel_shuffle pixel_unshuffle tril triu channel_shuffle".split())
_RESHAPES = {"view": "reshape", "view_as": "reshape_as"}


def _call_on_ids(node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    op = op_name(node.target)
    if op in ("pad", "constant_pad_nd"):
        amounts = args[1] if len(args) > 1 else kwargs["pad"]
        return torch.nn.functional.pad(args[0].double(), amounts, CALL.of(node).get("mode", "constant")).int()
    if op == "detach" or op == "contiguous":
        return args[0]
    if op in _RESHAPES:
        return getattr(args[0], _RESHAPES[op])(*args[1:], **kwargs)
    if op.removesuffix("_") in _NEEDS_MEMORY:
        args[0] = args[0].contiguous()
    return _call(node, args, kwargs)


def _call(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _several(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, tuple | list) else [outputs]


_WRITES = frozenset({"slice_scatter", "select_scatter", "diagonal_scatter"})
_INDEXING = frozenset({"getitem", "index_select", "index"})


def _indexed_dim(node: fx.Node, index: fx.Node) -> int:
    """Return the source dim that an index tensor indexes."""
    if op_name(node.target) == "index_select":
        dim: int = int(node.args[1]) % FAKE.of(node.args[0]).dim()  # type: ignore[arg-type]
        return dim
    items = node.args[1]
    if not isinstance(items, tuple | list):
        return 0
    ndim = FAKE.of(node.args[0]).dim()
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    dim = 0
    for item in items:
        if item is index:
            return dim
        dim += ndim - used if item is Ellipsis else 0 if item is None and op_name(node.target) != "index" else 1
    raise LookupError("an index tensor stands nowhere in its index")
