"""Rules of fxgrad's operators."""

from __future__ import annotations

from torch import Tensor

from fxgrad.proof.calls import Call, Undecided
from fxgrad.proof.origins import along_dim, any_samples, folded, joined, whole
from fxgrad.proof.rules.registry import follows
from fxgrad.proof.trials import rows_of


@follows("fxgrad::recurrence")
def recurrence(call: Call) -> list[Tensor]:
    """Join ids over time and features: ``x [T, B, in]``, states ``[B, H]``, lengths ``[B]``."""
    rows = folded(call.ids("x"), [0, 2]).reshape(-1)
    for name in ("h0", "c0", "lengths"):
        if call.has(name):
            ids = call.ids(name)
            rows = joined(rows, folded(ids, range(1, ids.dim())).reshape(-1))
    weights = [call.ids(name) for name in ("w_ih", "b_ih", "w_hh", "b_hh", "w_hr") if call.has(name)]
    if any(bool(ids.any()) for ids in weights):
        raise Undecided("its weights hold samples")
    # an output of rank 1 is a placeholder for one that this kind of layer lacks
    return [along_dim(rows, 0 if out.dim() < 3 else 1, out.dim()) for out in call.outputs]


@follows("fxgrad::grouped_rows")
def grouped_rows(call: Call) -> Tensor:
    rows = folded(call.ids("input"), [1])
    table = whole(call.ids("weight"))
    return joined(rows, call.ids("ids").reshape(-1, 1), table)


@follows("fxgrad::pad_packed fxgrad::pad_packed_to_longest", unread="batch_sizes order unsorted")
def pad_packed(call: Call) -> Tensor:
    """Unpack rows, in the order of their indices, into ``[T, B, *]``."""
    _check_rows(call, call.ids("data"))
    return _samples(call, 1)


@follows("fxgrad::packed_lengths", unread="x batch_sizes order unsorted")
def packed_lengths(call: Call) -> Tensor:
    return _samples(call, 0)


@follows("fxgrad::repack", unread="batch_sizes order")
def repack(call: Call) -> Tensor:
    """Pack ``[T, B, *]`` into rows, in the order of the given indices."""
    source, samples = _columns(call.ids("x")), call.facts.packs[_pack(call)][call.place]
    if not bool(((source == 0) | (source == samples)).all()):
        raise Undecided("what it packs is not padded")
    return _rows(call, _pack(call), call.out_rank())


@follows("fxgrad::pack")
def pack(call: Call) -> list[Tensor]:
    """Pack ``[T, B, *]`` with lengths ``[B]`` into rows; batch sizes and order depend on all samples."""
    size = call.shape("x")[1]
    samples = joined(_columns(call.ids("x")), call.ids("lengths")).expand(size)
    if not bool((samples > 0).all()):
        raise Undecided("its lengths are not those of its samples, one for each")
    call.new_pack.append(samples)
    return [_rows(call, len(call.facts.packs), call.out_rank()), any_samples(1), any_samples(1)]


def _columns(ids: Tensor) -> Tensor:
    """Return the ids of each column of ``[T, B, *]``."""
    return folded(ids, [dim for dim in range(ids.dim()) if dim != 1]).reshape(-1)


def _pack(call: Call) -> int:
    """Return the packed sequence to which both the batch sizes and the order belong."""
    packs = {call.facts.of(call.arguments[name]).pack for name in ("batch_sizes", "order")}
    (pack_read,) = packs if len(packs) == 1 else (None,)
    if pack_read is None:
        raise Undecided("its sizes and its order are not those of one packed sequence")
    return pack_read


def _check_rows(call: Call, data: Tensor) -> None:
    rows = folded(data, range(1, data.dim())).reshape(-1)
    if not bool(((rows == 0) | (rows == rows_of(_pack(call), len(rows)))).all()):
        raise Undecided("its rows are not in the order of its indices")


def _rows(call: Call, pack: int, rank: int) -> Tensor:
    count = call.out_shape()[0]
    return along_dim(rows_of(pack, count), 0, rank)


def _samples(call: Call, dim: int) -> Tensor:
    return along_dim(call.facts.packs[_pack(call)][call.place], dim, call.out_rank())


@follows("embedding_renorm")
def embedding_renorm(call: Call) -> Tensor:
    """Renorm the rows that are read; `embedding` has the samples that read them."""
    return joined(whole(call.ids("indices")), folded(call.ids("self"), [1]))
