"""Layouts of gather, scatter and other ops that read or write by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.ops.facts import FAKE
from fxgrad.samples.ids import sample_ids
from fxgrad.samples.layouts import Kind, Layout, kind_of
from fxgrad.samples.operands import Answer, Mixes, Op, Operand, by_shape

_FOREIGN = Mixes("it writes one sample's values into another's places")
BY_OFFSETS = Mixes(
    "its bags are given by offsets, so a row is not a sample",
    advice="Give it ids of two dimensions, one row for each sample, and no offsets.",
)
_BY_INDEX = "Write at an index, such as h[torch.arange(x.shape[0])] = x, or choose by torch.where(mask, x, h)."
_ADDED = frozenset({"index_add", "index_copy", "scatter_add"})
_VALUES = ("source", "src", "values")  # the ops' argument names of the written values


def per_index(op: Op, output: Tensor) -> Answer:
    """Follow gather and scatter: samples on the same dim of every operand, which is not the indexed one."""
    table = op.operand("input")
    if op.call.op in ("gather", "take_along_dim") and table is not None and table.layout is None:
        return by_shape(op, output)  # each sample reads from a shared table
    index = op.operand("index")
    values = next((operand for name in _VALUES if (operand := op.operand(name)) is not None), None)
    dims = op.dims("dim", output.dim())
    if op.call.op in _ADDED and values is not None and values.layout is not None and values.layout.dim in (dims or ()):
        return _by_places(op, output, values)
    if op.call.op in ("index_add", "index_copy", "index_fill") and index is not None and index.layout is not None:
        return Mixes("its index, which all samples share, holds samples")
    answer = by_shape(op, output)
    if isinstance(answer, Mixes):
        return answer
    if dims is None or answer.dim in dims:
        return Mixes("it indexes the sample dimension")
    if any(layout != answer for _, layout in op.batched):
        return Mixes("its operands hold the samples in different places")
    if op.call.op.startswith("scatter") and any(o.layout is None and o.fake.dim() == output.dim() for o in op.operands):
        return Mixes("it writes to the first samples only")  # an index may be smaller than its destination
    return answer


def index_put(op: Op, output: Tensor) -> Answer:
    """Follow index_put: the elements at the written indices must belong to the samples of the written values."""
    answer = by_shape(op, output)
    base, values = op.operand("input"), op.operand("values")
    nodes = [node for node in (base and base.node, *_indices(op)) if node]
    if values is not None and values.layout is not None and all(kind_of(n) is Kind.CONSTANT for n in nodes):
        return _by_places(op, output, values)
    if isinstance(answer, Mixes) or base is None or base.layout is None:
        return answer if isinstance(answer, Mixes) else Mixes("what it writes to holds no samples")
    layout, rank = op.replay.read_back(op.node)
    if layout is None:
        return Mixes("the places that it writes to are not those of one sample")
    if values is not None and values.layout is not None:
        same = values.layout.dim - values.fake.dim() == layout.dim - rank and values.layout.at(0) == layout.at(0)
        return answer if same else _FOREIGN
    return answer


def bags(op: Op, output: Tensor) -> Answer:
    """Follow ``embedding_bag(ids.flatten(), w, arange(B) * T)``: the ids of each sample are one bag."""
    offsets, batches = op.operand("offsets"), op.replay.thresholds.batches(op.node)
    source, layout = next(op.batched)
    if offsets is None or kind_of(offsets.node) is not Kind.CONSTANT or batches is None:
        return BY_OFFSETS
    if any(operand.name == "weight" or other != layout for operand, other in op.batched):
        return BY_OFFSETS
    if any(kind_of(operand.node) is Kind.CONSTANT for operand, _ in op.batched):  # one number for each row of the batch
        return BY_OFFSETS
    for batch in batches:
        try:
            starts = op.replay.constant(offsets.node, batch).long()
        except (RuntimeError, IndexError):  # an index is out of range at two or three samples
            return BY_OFFSETS
        ids = op.replay.ids(layout, source.node, batch)
        ends = ids.long().bincount(minlength=batch + 1)[1:].cumsum(0)
        borders = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        expected = borders if op.call.get("include_last_offset") else borders[:-1]
        if not torch.equal(ids, ids.sort().values) or not torch.equal(starts, expected):
            return BY_OFFSETS
    return by_shape(op, output)


def _by_places(op: Op, output: Tensor, values: Operand) -> Answer:
    """Follow a write of batched values along the sample dim, by an index made only of sizes.

    Replay the write on sample ids, as for ``index_add(zeros(B*T, d), 0, arange(B*T*k) // k, x)``. Each element may get
    ids of one sample only: the sample to which the element belongs.
    """
    base, indices = op.operand("input"), _indices(op)
    if base is None or any(kind_of(node) is not Kind.CONSTANT for node in indices):
        return Mixes("the data decides to which samples' places it writes")
    if any(FAKE.of(node).dtype in (torch.bool, torch.uint8) for node in indices):
        return Mixes("a mask decides to which samples' places it writes", advice=_BY_INDEX)
    blank = _replayed(op, output, None, values) if kind_of(base.node) is Kind.CONSTANT else None
    if blank is not None or base.layout is None:
        return blank or _FOREIGN
    return _replayed(op, output, base.layout, values) or _FOREIGN


def _indices(op: Op) -> list[fx.Node]:
    arg = op.call.get("index", op.call.get("indices"))
    return [node for node in (arg if isinstance(arg, tuple | list) else [arg]) if isinstance(node, fx.Node)]


def _replayed(op: Op, output: Tensor, base: Layout | None, values: Operand) -> Layout | None:
    """Return the layout of the result for a destination of layout ``base`` or without samples; None if mixed."""
    batches = op.replay.thresholds.batches(op.node)
    if batches is None:
        return None
    try:
        runs = [_written(op, output, base, values, batch) for batch in batches]
    except (RuntimeError, IndexError):  # the index is out of range at two or three samples
        return None
    return None if any(run is None for run in runs) else op.replay.read(runs, output, batches=batches)


def _written(op: Op, output: Tensor, base: Layout | None, values: Operand, batch: int) -> Tensor | None:
    """Return the sample ids after the write; None if an element gets ids of two samples."""
    assert values.layout is not None
    shape = op.symbols.shape(output, batch)
    before = torch.zeros(shape, dtype=torch.int32) if base is None else sample_ids(base, shape, batch).contiguous()
    new = op.replay.ids(values.layout, values.node, batch)
    places = [op.replay.constant(node, batch).long() for node in _indices(op)]
    if op.call.op == "scatter_add":  # an index may be smaller than the source
        new = new[tuple(slice(size) for size in places[0].shape)]
    index = _written_places(op, output.dim(), places)
    after = before.clone()
    after[index] = new
    same = bool((after[index] == new).all()) and (base is None or torch.equal(after, before))
    return after if same else None


def _written_places(op: Op, rank: int, places: list[Tensor]) -> tuple[Any, ...]:
    """Return the index for which the op adds to, or writes, ``base[index]``."""
    if op.call.op == "index_put":  # None for a full slice
        rest = iter(places)
        return tuple(next(rest) if isinstance(item, fx.Node) else slice(None) for item in op.call.arguments["indices"])
    dim = (op.dims("dim", rank) or [0])[0]
    if op.call.op == "scatter_add":
        grid = torch.meshgrid([torch.arange(size) for size in places[0].shape], indexing="ij")
        return (*grid[:dim], places[0], *grid[dim + 1 :])
    return (*[slice(None)] * dim, places[0])
