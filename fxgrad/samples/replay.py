"""Replay: run a movement op on a tensor of sample ids and read the layout of its result.

A movement op (view, permute, chunk, index, cat, ...) copies values without reading them. fxgrad runs it on small
integers that name samples, at two batch sizes, and reads the layout from the result. The ids are 1..B; 0 stands for an
element of no sample (a constant, padding). `every_batch` chooses the two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.host.pytree import tree_map
from fxgrad.ops.calls import CALL, Call, op_name
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import RANDOM
from fxgrad.ops.forms import SHAPED_AS
from fxgrad.ops.values import memory_of
from fxgrad.ops.written import written_to
from fxgrad.samples.every_batch import BATCHES, Batches, EveryBatch
from fxgrad.samples.ids import read_copies, read_layout, read_written, sample_ids
from fxgrad.samples.layouts import Kind, Layout, Samples
from fxgrad.samples.symbols import Symbols, expression


class Replay:
    """The replay of single nodes on sample ids, at given batch sizes."""

    def __init__(self, symbols: Symbols, samples: Callable[[fx.Node], Any]) -> None:
        self.symbols = symbols
        self.samples = samples  # node -> its `Samples`
        self.every = EveryBatch(symbols, samples, self.constant)
        self.constants: dict[tuple[fx.Node, int], Any] = {}
        self.written: dict[fx.Graph, set[int | None]] = {}  # the memory that each graph's ops write to

    def layouts(self, node: fx.Node, outputs: Any, lined_up: Mapping[fx.Node, Layout] | None = None) -> Any:
        """Return the layout of each output tensor of a movement op; None for one without.

        An op that fails on two or three samples (it takes rows 2 to 4) has none either. ``lined_up`` names constants
        with one row per sample.
        """
        try:
            return self._layouts(node, outputs, lined_up or {})
        except (RuntimeError, IndexError, ValueError):
            return [None] * len(outputs) if isinstance(outputs, tuple | list) else None

    def _layouts(self, node: fx.Node, outputs: Any, lined_up: Mapping[fx.Node, Layout]) -> Any:
        batches = self.every.sizes(node)
        if batches is None:
            return [None] * len(outputs) if isinstance(outputs, tuple | list) else None
        packed = [arg for arg in node.all_input_nodes if self._rows(arg)]
        if packed:
            several = isinstance(outputs, tuple | list)
            layouts_of_outputs = [self._packed(node, packed, i) for i in range(len(outputs) if several else 1)]
            return layouts_of_outputs if several else layouts_of_outputs[0]
        if op_name(node.target) in _INDEXING:
            return self._indexed(node, outputs, batches)
        runs = [self._run(node, batch, known=self._rows_of(lined_up, batch)) for batch in batches]
        if isinstance(outputs, Tensor):
            return self.read(runs, outputs, self._reader(node), batches)
        if not all(isinstance(run, tuple | list) and len(run) == len(outputs) for run in runs):
            return [None] * len(outputs)
        columns = zip(*runs, strict=True)
        return [self.read(list(column), out, batches=batches) for column, out in zip(columns, outputs, strict=True)]

    def _reader(self, node: fx.Node) -> Any:
        """Return the function that reads the layout; it checks that a parameter's value is written to every sample."""
        known = [self.samples(arg) for arg in node.all_input_nodes]
        uniform = any(isinstance(samples, Samples) and samples.kind is Kind.UNIFORM for samples in known)
        return read_written if uniform and op_name(node.target) in _WRITES else read_layout

    def _rows_of(self, lined_up: Mapping[fx.Node, Layout], batch: int) -> dict[fx.Node, Tensor]:
        shapes = {node: [self.symbols.evaluate(size, batch) for size in FAKE.of(node).shape] for node in lined_up}
        return {node: sample_ids(layout, shapes[node], batch) for node, layout in lined_up.items()}

    def _rows(self, node: fx.Node) -> Layout | None:
        """Return the layout of packed data; None for any other value."""
        known = self.samples(node)
        layout = known.layout if isinstance(known, Samples) and known.kind is Kind.BATCHED else None
        return layout if layout is not None and layout.rows is not None else None

    def _packed(self, node: fx.Node, packed: list[fx.Node], output: int) -> Layout | None:
        """Return the layout of packed data after an op; None unless its rows keep their content and order."""
        layouts = [self._rows(arg) for arg in packed]
        result = self._run(node, BATCHES[0])
        ids = result[output] if isinstance(result, tuple | list) else result
        layout, size = layouts[0], FAKE.of(packed[0]).shape
        assert layout is not None
        moved = read_layout(ids, self.symbols.evaluate(size[layout.dim], BATCHES[0]))
        batched = [arg for arg in node.all_input_nodes if _is_batched(self.samples(arg))]
        agreed = batched == packed and all(other is not None and other.at(0) == layout.at(0) for other in layouts)
        return layout.at(moved[0]) if agreed and moved is not None and moved[1:] == (1, 1) else None

    def _indexed(self, node: fx.Node, output: Tensor, batches: Batches) -> Layout | None:
        """Return the layout of ``x[ids]``; x and each batched index must lead to the same one."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        indices = [arg for arg in node.all_input_nodes if isinstance(FAKE.of(arg), Tensor) and arg is not source]
        batched = [arg for arg in indices if self.samples(arg).kind is Kind.BATCHED]
        layouts = []
        if self.samples(source).kind is Kind.BATCHED:
            layouts.append(self.read([self._run(node, batch) for batch in batches], output, batches=batches))
        for index in batched:
            runs = [self._probe(node, index, batch) for batch in batches]
            layouts.append(self.read(runs, output, batches=batches))
        return layouts[0] if layouts and all(layout == layouts[0] for layout in layouts) else None

    def read_back(self, node: fx.Node) -> tuple[Layout | None, int]:
        """Return layout and rank of ``x[indices]``, the elements that ``index_put_(x, indices, v)`` writes to."""
        source, indices = (CALL.of(node).arguments[name] for name in ("input", "indices"))
        scratch = fx.Graph()
        reading = scratch.call_function(torch.ops.aten.index.Tensor, (source, indices))
        try:
            with self.symbols.mode:
                output = reading.target(*fx.map_arg(reading.args, lambda arg: FAKE.of(arg)))  # type: ignore[operator]
            return self.layouts(reading, output), output.dim()
        finally:
            scratch.erase_node(reading)

    def _probe(self, node: fx.Node, index: fx.Node, batch: int) -> Any:
        """Index a table of positions by sample ids; the result is the ids of the index in the output."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dim = _indexed_dim(node, index)
        shape = [self.symbols.evaluate(size, batch) for size in FAKE.of(source).shape]
        shape[dim] = batch + 1
        positions = torch.arange(batch + 1, dtype=torch.int32)
        probe = positions.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        sizes = [self.symbols.evaluate(size, batch) for size in FAKE.of(index).shape]
        layout = self.samples(index).layout
        ids = sample_ids(layout, sizes, batch).long()
        return self._run(node, batch, known={source: probe, index: ids})

    def copies(self, node: fx.Node, output: Tensor, dim: int) -> Layout | None:
        """Return the layout of a parameter's value that a movement op copied to each sample."""
        batches = self.every.sizes(node)
        if batches is None:
            return None
        splits = [read_copies(self._run(node, batch, elements=True), dim, batch) for batch in batches]
        return self._agreed(splits, output)

    def keeps_rows(self, node: fx.Node, rows: fx.Node) -> bool:
        """Decide whether a movement op keeps the order of this operand along its sample dim."""
        (dim,) = self.symbols.batch_dims(FAKE.of(rows).shape)
        batches = self.every.sizes(node)
        if batches is None:
            return False
        for batch in batches:
            shape = [self.symbols.evaluate(size, batch) for size in FAKE.of(rows).shape]
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
        shapes = [tuple(self.symbols.evaluate(s, b) for s in output.shape) for b in batches]
        if [tuple(run.shape) for run in runs] != shapes:
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
        self, node: fx.Node, batch: int, *, elements: bool = False, known: dict[fx.Node, Tensor] | None = None
    ) -> Any:
        indices = node.all_input_nodes if op_name(node.target) in _INDEXING else []

        def value(arg: fx.Node) -> Any:
            if known is not None and arg in known:
                return known[arg]
            if arg in indices and arg is not node.args[0] and isinstance(FAKE.of(arg), Tensor):
                return self.constant(arg, batch)
            return self._value(arg, batch, elements)

        args = fx.map_arg(node.args, value)
        kwargs = dict(fx.map_arg(dict(node.kwargs), value))
        return _call_on_ids(node, list(_plain(args)), _plain(kwargs))

    def _value(self, node: fx.Node, batch: int, elements: bool) -> Any:
        fake = FAKE.of(node)
        if isinstance(fake, Tensor):
            return self._ids(node, fake, batch, elements)
        if isinstance(fake, tuple | list) and any(isinstance(item, Tensor) for item in fake):
            return self._run(node, batch, elements=elements)
        return tree_map(lambda size: self.symbols.evaluate(size, batch), fake)

    def _ids(self, node: fx.Node, fake: Tensor, batch: int, elements: bool) -> Tensor:
        shape = [self.symbols.evaluate(size, batch) for size in fake.shape]
        known: Samples = self.samples(node)
        if known.kind is Kind.BATCHED and known.layout is not None and not elements:
            return sample_ids(known.layout, shape, batch)
        if elements and known.kind is Kind.UNIFORM:
            return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int32).view(shape)
        return torch.zeros((), dtype=torch.int32).expand(shape)

    def constant(self, node: fx.Node, batch: int) -> Tensor:
        """Return the value of a constant made only of sizes; zeros for any other constant."""
        key = (node, batch)
        if key not in self.constants:
            self.constants[key] = self._compute(node, batch)
        return self.constants[key]  # type: ignore[no-any-return]

    def _compute(self, node: fx.Node, batch: int) -> Tensor:
        fake = FAKE.of(node)
        shape = [self.symbols.evaluate(size, batch) for size in fake.shape]
        computed = node.op in ("call_function", "call_method") and not self.changes(node)
        if computed and self.samples(node).kind is Kind.CONSTANT:
            try:
                return self._compute_call(node, batch)
            except _UnknownData:
                pass
        return torch.zeros(shape, dtype=fake.dtype)

    def _compute_call(self, node: fx.Node, batch: int) -> Tensor:
        def value(arg: fx.Node) -> Any:
            fake = FAKE.of(arg)
            if not isinstance(fake, Tensor):
                return tree_map(lambda size: self.symbols.evaluate(size, batch), fake)
            if op_name(node.target) in SHAPED_AS and arg is not node.args[0]:
                return torch.empty([self.symbols.evaluate(size, batch) for size in fake.shape])
            if arg.op not in ("call_function", "call_method") or not _is_index(fake) or self.changes(arg):
                raise _UnknownData
            if self.samples(arg).kind is not Kind.CONSTANT:
                raise _UnknownData
            return self._compute_call(arg, batch)

        args = list(_plain(fx.map_arg(node.args, value)))
        kwargs = _plain(fx.map_arg(dict(node.kwargs), value))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        if op_name(node.target) in _ORDERS and _has_ties(args[0], CALL.of(node)):
            raise _UnknownData
        if isinstance(node.target, str):
            result = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            result = node.target(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise _UnknownData
        return result

    def changes(self, node: fx.Node) -> bool:
        """Decide whether a value is random or overwritten in place; a replay repeats neither."""
        if node.graph not in self.written:
            calls = [(other, CALL.of(other)) for other in node.graph.nodes if CALL.on(other)]
            places = [place for other, call in calls for place in written_to(other, call)]
            self.written[node.graph] = {memory_of(FAKE.of(place)) for place in places}
        return _impure(node) or memory_of(FAKE.of(node)) in self.written[node.graph]


def _is_batched(samples: Any) -> bool:
    return isinstance(samples, Samples) and samples.kind is Kind.BATCHED


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


def _impure(node: fx.Node) -> bool:
    name = op_name(node.target)
    return name.endswith("_") or name in RANDOM


def _is_index(fake: Tensor) -> bool:
    return not fake.is_floating_point() and not fake.is_complex()


def _plain(args: Any) -> Any:
    """Convert FX's immutable containers to ordinary ones."""
    if isinstance(args, dict):
        return {key: _plain(value) for key, value in args.items()}
    if isinstance(args, slice):
        return slice(_plain(args.start), _plain(args.stop), _plain(args.step))
    if isinstance(args, tuple):
        return tuple(_plain(value) for value in args)
    return [_plain(value) for value in args] if isinstance(args, list) else args


_NEEDS_MEMORY = frozenset("repeat_interleave pixel_shuffle pixel_unshuffle tril triu channel_shuffle".split())
_RESHAPES = {"view": "reshape", "view_as": "reshape_as"}


def _call_on_ids(node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    op = op_name(node.target)
    if op in ("pad", "constant_pad_nd"):
        padded = torch.nn.functional.pad(args[0].double(), *args[1:2], **_pad_mode(args, kwargs))
        return padded.int()
    if op == "detach" or op == "contiguous":
        return args[0]
    if op in _RESHAPES:
        return getattr(args[0], _RESHAPES[op])(*args[1:], **kwargs)
    if op.removesuffix("_") in _NEEDS_MEMORY:
        args[0] = args[0].contiguous()
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


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


def _pad_mode(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    kept = {"pad": kwargs["pad"]} if "pad" in kwargs else {}
    return {**kept, "mode": mode if isinstance(mode, str) else "constant"}
