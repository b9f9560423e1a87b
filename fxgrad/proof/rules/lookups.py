"""Rules of gather, scatter and other ops that read or write at indices in tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxgrad.proof.calls import Call, Undecided
from fxgrad.proof.origins import added, added_at, along_dim, chosen, folded, joined, no_samples, whole
from fxgrad.proof.rules.registry import follows


@follows("index _unsafe_index")
def index(call: Call) -> Tensor:
    """Index with tensors: known indices pick ids; along other indexed dimensions, join the ids of all elements."""
    indices = {dim: one for dim, one in enumerate(call.arguments["indices"]) if one is not None}
    if any(one.dtype in (torch.bool, torch.uint8) for one in indices.values()):  # all of a mask decides about each
        call.shape("self")
        return _everything(call, [call.ids("self"), *map(call.of, indices.values())])
    return _indexed(call, indices)


def _indexed(call: Call, indices: Mapping[int, Tensor]) -> Tensor:
    source, shape = call.ids("self"), call.shape("self")
    steps: list[Any] = [slice(None)] * source.dim()
    which = no_samples(0)
    for dim, places in indices.items():
        which = joined(which, call.of(places))
        known = _known(call, places, shape[dim]) if source.shape[dim] != 1 else None
        if known is None:
            source = folded(source, [dim])
            steps[dim] = torch.zeros([1] * places.dim(), dtype=torch.int64)
        else:
            source = call.full(source, shape, [dim])
            steps[dim] = known % shape[dim]
    picked, rank, at = source[tuple(steps)], _rank(indices), list(indices)
    behind = picked.dim() - rank - (at[0] if _adjacent(at) else 0)
    return chosen(picked, which.reshape([*[1] * (rank - which.dim()), *which.shape, *[1] * behind]))


def _adjacent(dims: list[int]) -> bool:
    return dims == list(range(dims[0], dims[-1] + 1))


def _everything(call: Call, parts: list[Tensor], i: int = 0) -> Tensor:
    """Return the ids of an output whose elements depend on all elements of all parts."""
    return joined(*map(whole, parts)).reshape([1] * call.out_rank(i))


def _known(call: Call, tensor: Tensor, size: int) -> Tensor | None:
    """Return the values of an index made only of sizes and constants; refuse it if other batch sizes may change it."""
    origins = call.facts.of(tensor)
    if origins.known is None:
        return None
    if not origins.known.certain(call.trial):
        raise Undecided("its index may be another one at more samples")
    value = origins.known.value(call.trial)
    return value if bool(((value >= -size) & (value < size)).all()) else None


@follows("index_select")
def index_select(call: Call) -> Tensor:
    rank = call.out_rank()
    (dim,) = call.dims("dim", rank)
    picked = _indexed(call, {dim: call.arguments["index"]})
    return picked if picked.dim() == rank else picked.unsqueeze(dim)  # an index without dimensions


def form(table: Tensor) -> tuple[str, ...]:
    """Return a table's shape; views of equal shape have equal rows."""
    return tuple(map(str, table.shape))


@follows("embedding")
def embedding(call: Call) -> Tensor:
    """Look up a row of the table for each index."""
    table, ids = call.ids("weight"), call.ids("indices")
    renormed = call.facts.of(call.arguments["weight"]).renormed
    indices, shape = call.facts.of(call.arguments["indices"]), form(call.arguments["weight"])
    if renormed is not None and renormed[0] is indices and renormed[2] == shape:
        table = no_samples(2)  # renorm leaves a row that is read equally short, whichever samples read it
    row = folded(table, [0]) if table.shape[0] != 1 else table
    return joined(ids.unsqueeze(-1), row) if bool(ids.any()) else row.reshape([*[1] * ids.dim(), row.shape[-1]])


@follows("gather")
def gather(call: Call) -> Tensor:
    source, which = call.ids("self"), call.ids("index")
    if source.dim() == 0 or which.dim() == 0:
        return joined(source, which)
    shape = call.shape("self")
    (dim,) = call.dims("dim", source.dim())
    wanted = call.shape("index")
    for d, size in enumerate(source.shape):
        if d != dim and size != 1 and shape[d] != wanted[d]:
            source = call.full(source, shape, [d]).narrow(d, 0, wanted[d])
    if source.shape[dim] != 1:
        known = _known(call, call.arguments["index"], shape[dim])
        if known is None:
            source = folded(source, [dim])
        else:
            sizes = [max(1, s) for s in wanted]
            sizes[dim] = shape[dim]
            full = call.full(source, sizes, range(source.dim()))
            source = full.gather(dim, known.expand(wanted) % shape[dim])
    return chosen(source, which)


@follows("scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce")
def put(call: Call) -> Tensor:
    """Write along one dimension; without known indices, a source row may be written to any index."""
    base, shape = call.ids("self"), call.shape("self")
    name = next((name for name in ("src", "source", "value") if call.has(name)), None)
    what, which = (call.ids(name) if name else no_samples(0)), call.ids("index")
    if base.dim() == 0:
        return joined(base, what.reshape([]), which.reshape([]))
    (dim,) = call.dims("dim", base.dim())
    if call.name.startswith("index_"):
        which = along_dim(which, dim, base.dim())
    what = what.reshape([1] * base.dim()) if what.dim() < base.dim() else what
    linear = call.name in ("scatter_add", "index_add")
    if not bool(which.any()) and not what.shape[dim] == base.shape[dim] == 1:
        places = _places(call, dim, shape)
        if places is not None:
            return _put_at(call, base, what, places, dim, linear=linear)
    if name is not None and call.name.startswith("scatter") and what.dim() == len(shape):
        _check_whole(what, call.shape(name), shape, dim)
    what = chosen(folded(what, [dim], linear=linear), folded(which, [dim]))
    return added(base, what) if linear or torch.equal(*torch.broadcast_tensors(base, what)) else joined(base, what)


def _check_whole(what: Tensor, source_shape: list[int], shape: list[int], dim: int) -> None:
    for d, size in enumerate(what.shape):
        if d != dim and size != 1 and source_shape[d] != shape[d]:
            raise Undecided("it writes to a part of each dimension")


def _places(call: Call, dim: int, shape: list[int]) -> Tensor | None:
    """Return the index that each source row is written to; None if unknown or if it varies within a row."""
    index = call.arguments["index"]
    known = _known(call, index, shape[dim])
    if known is None or call.name.startswith("index_"):
        return None if known is None else known.reshape(-1) % shape[dim]
    rows = known.movedim(dim, 0).reshape(known.shape[dim], -1)
    return rows[:, 0] % shape[dim] if bool((rows == rows[:, :1]).all()) else None


def _put_at(call: Call, base: Tensor, what: Tensor, places: Tensor, dim: int, *, linear: bool) -> Tensor:
    size = call.shape("self")[dim]
    if call.name.startswith("scatter"):
        wanted = call.shape("index")
        if any(size not in (1, wanted[d]) for d, size in enumerate(what.shape) if d != dim):
            raise Undecided("it writes a part of what it is given")
        if any(size != 1 and size != wanted[d] for d, size in enumerate(base.shape) if d != dim):
            raise Undecided("it writes to a part of each dimension")
    if what.shape[dim] != 1 and what.shape[dim] < len(places):
        raise Undecided("it writes fewer rows than it names")
    rows = what.narrow(dim, 0, len(places)) if what.shape[dim] != 1 else what
    rows = rows.expand([*what.shape[:dim], len(places), *what.shape[dim + 1 :]])
    written = added_at(rows, places, size, dim)
    if linear:
        return added(base, written)  # at an index that nothing is written to, this is an upper bound
    if call.name != "index_copy" or len(places.unique()) < len(places):
        return joined(base, written)
    over = torch.zeros(size, dtype=torch.bool).index_fill(0, places, True)
    return torch.where(along_dim(over, dim, base.dim()), written, base)


@follows("index_put _unsafe_index_put")
def index_put(call: Call) -> Tensor:
    """Write at indices in tensors; an unknown index may be any along its dimension."""
    base, shape = call.ids("self"), call.shape("self")
    indices = {dim: one for dim, one in enumerate(call.arguments["indices"]) if one is not None}
    linear = bool(call.get("accumulate"))
    if any(one.dtype in (torch.bool, torch.uint8) for one in indices.values()):
        return _put_masked(call, base, linear=linear)
    sent = _sent(call, indices)
    known_or_none = {dim: _known(call, one, shape[dim]) for dim, one in indices.items()}
    known = {dim: place for dim, place in known_or_none.items() if place is not None}
    sizes = [shape[dim] for dim in known]
    rows = math.prod(sizes)
    where = torch.zeros([1], dtype=torch.int64)
    for dim, place in known.items():
        where = where * shape[dim] + place % shape[dim]
    where = where.expand(sent.shape[: _rank(indices)]).reshape(-1)
    sent = sent.reshape([len(where), *sent.shape[_rank(indices) :]])
    rest = [dim for dim in range(base.dim()) if dim not in indices]
    order = [*known, *(dim for dim in indices if dim not in known), *rest]

    def placed(values: Tensor) -> Tensor:
        values = values.reshape([*sizes, *[1] * (len(indices) - len(known)), *values.shape[1:]])
        return values.movedim(list(range(base.dim())), order)

    written = placed(added_at(sent, where, rows, 0))
    if linear:
        return added(base, written)
    if len(known) < len(indices) or len(where.unique()) < len(where):
        return joined(base, written)
    over = torch.zeros([rows, *[1] * len(rest)], dtype=torch.bool).index_fill(0, where, True)
    return torch.where(placed(over), written, base)  # an overwritten element loses its ids


def _rank(indices: Mapping[int, Tensor]) -> int:
    return max(one.dim() for one in indices.values())


def _sent(call: Call, indices: Mapping[int, Tensor]) -> Tensor:
    """Return the ids of the written values and their indices: dimensions of the indices first, then the others."""
    rank, at = _rank(indices), list(indices)
    rest = call.out_rank() - len(at)
    values = call.ids("values")
    sent = values.reshape([*[1] * (rank + rest - values.dim()), *values.shape])
    if _adjacent(at) and at[0] != 0:  # adjacent indexed dimensions keep their position
        sent = sent.movedim(list(range(at[0], at[0] + rank)), list(range(rank)))
    for places in indices.values():
        which = call.of(places)
        sent = chosen(sent, which.reshape([*[1] * (rank - which.dim()), *which.shape, *[1] * rest]))
    wanted = torch.broadcast_shapes(*(call.trial.shape(places.shape) for places in indices.values()))
    return sent.expand([*wanted, *sent.shape[rank:]])


def _put_masked(call: Call, base: Tensor, *, linear: bool) -> Tensor:
    """Write under a mask: one number only where the mask is true; several by the order of the whole mask."""
    indices, values = call.arguments["indices"], call.ids("values")
    parts = [call.of(one) for one in indices if one is not None]
    if len(indices) == len(parts) == 1 and not linear and call.arguments["values"].numel() == 1:
        mask = parts[0].reshape([*parts[0].shape, *[1] * (base.dim() - parts[0].dim())])
        return joined(base, mask, values.reshape([1] * base.dim()))
    return _everything(call, [*parts, base, values])


@follows("nonzero nonzero_static masked_select unique_consecutive _unique2 unique_dim bincount histc")
def counted(call: Call) -> list[Tensor]:
    return [_everything(call, call.all_ids(), i) for i in range(len(call.outputs))]


@follows("bucketize searchsorted")
def sought(call: Call) -> Tensor:
    where = call.ids("boundaries" if call.has("boundaries") else "sorted_sequence")
    values = call.ids("self") if call.has("self") else no_samples(call.out_rank())
    where = joined(where, call.ids("sorter")) if call.has("sorter") else where
    rows = folded(where, [-1])
    return call.ranked(joined(values, rows) if rows.dim() > 1 else joined(values, rows.reshape([])))


@follows("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(call: Call) -> list[Tensor]:
    """Reduce bags of table rows; the offsets assign indices to bags."""
    ids, table = call.ids("indices"), folded(call.ids("weight"), [0])
    bags = call.out_shape()[0]
    if call.has("per_sample_weights"):
        ids = joined(ids, call.ids("per_sample_weights"))
    if bool(call.ids("offsets").any()):
        raise Undecided("which of its rows are in a bag, samples say")
    if ids.shape[0] == 1:
        bag_ids = ids.reshape(1, 1)
    else:
        offsets = call.facts.of(call.arguments["offsets"]).known
        if offsets is None or not offsets.certain(call.trial):
            raise Undecided("which of its rows are in a bag is known at run time")
        (count,) = call.shape("indices")
        starts = offsets.value(call.trial)[:bags]
        if bool((starts[1:] < starts[:-1]).any()):
            raise Undecided("its offsets go back")
        bag = torch.searchsorted(starts, torch.arange(count), right=True) - 1
        rows = call.full(ids, [count], [0]).unsqueeze(1)
        bag_ids = joined(added_at(rows, bag, bags, 0))
    rest = [_everything(call, [ids, table], i) for i in range(1, len(call.outputs))]
    return [joined(bag_ids, table), *rest]


@follows("masked_scatter put take")
def anywhere(call: Call) -> Tensor:
    return _everything(call, call.all_ids())
