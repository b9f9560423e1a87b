"""Rules of ops along some dimensions: reductions, cumulative ops, sorting, FFT and linear algebra."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxgrad.proof.calls import Call, Undecided
from fxgrad.proof.origins import folded, joined
from fxgrad.proof.rules.registry import follows

_LINEAR = frozenset("sum mean nansum cumsum".split())


def dims_of(call: Call, rank: int) -> list[int]:
    """Return the dimensions that an op works along."""
    for name in ("dim", "dims", "axis"):
        if name in call.arguments:
            return call.dims(name, rank)
    return list(range(rank))


def reduced(call: Call, ids: Tensor, dims: Sequence[int], *, linear: bool) -> Tensor:
    """Return the ids of a reduction over these dimensions, in the rank of its first output."""
    result = folded(ids, dims, linear=linear)
    if call.out_rank() < result.dim():
        result = result.squeeze(tuple(dims))
    return result


@follows(
    """sum mean nansum amax amin max min argmax argmin any all prod var std var_mean std_mean logsumexp norm
    linalg_vector_norm median nanmedian mode kthvalue count_nonzero aminmax topk sort cumsum cumprod cummax cummin
    logcumsumexp _softmax _log_softmax softmax log_softmax _safe_softmax _fft_r2c _fft_c2r _fft_c2c renorm glu
    _weight_norm_interface"""
)
def along(call: Call) -> Tensor | list[Tensor]:
    name = "self" if "self" in call.arguments else "input" if "input" in call.arguments else call.tensors[0][0]
    ids = call.ids(name)
    rank = ids.dim()
    if "other" in call.arguments:  # max(a, b)
        return call.ranked(joined(*call.all_ids()))
    for other, tensor in call.tensors:
        if other != name and bool(call.of(tensor).any()):
            raise Undecided(f"its {other} holds samples")
    dims = dims_of(call, rank)
    if call.name in ("renorm", "_weight_norm_interface"):
        counted = call.name == "renorm" or call.get("dim") >= 0  # dimension -1: one norm of all
        dims = [dim for dim in range(rank) if dim not in dims or not counted]
    result = reduced(call, ids, dims, linear=call.name in _LINEAR)
    return [result] * len(call.outputs)


_VECTORS = ("LU_pivots", "pivots", "tau", "input2")


@follows(
    """linalg_inv_ex linalg_cholesky_ex _linalg_svd _linalg_eigh linalg_qr linalg_eig linalg_lu linalg_lu_factor_ex
    _linalg_det _linalg_slogdet linalg_matrix_exp linalg_householder_product cholesky_inverse linalg_pinv
    linalg_ldl_factor_ex _linalg_eigvals linalg_eigvals cholesky geqrf lu_unpack ormqr"""
)
def matrices(call: Call) -> list[Tensor]:
    """Join ids over the last two dimensions of each operand; broadcast the others from the right."""
    parts = [_of_matrices(call.of(tensor), vectors=name in _VECTORS) for name, tensor in call.tensors]
    return [_spread(joined(*parts), output.dim()) for output in call.outputs]


def _of_matrices(ids: Tensor, *, vectors: bool) -> Tensor:
    """Return the ids of whole matrices, or of whole vectors."""
    last = 1 if vectors else 2
    ids = ids.reshape([*[1] * (last - ids.dim()), *ids.shape])
    return folded(ids, range(ids.dim() - last, ids.dim())).reshape(ids.shape[:-last])


@follows("_linalg_solve_ex triangular_solve linalg_solve_triangular linalg_lu_solve linalg_ldl_solve cholesky_solve")
def solved(call: Call) -> Tensor | list[Tensor]:
    """Follow ``A x = b``; b is a vector if its shape is that of A without the last dimension, else a matrix."""
    sides = {name: call.of(tensor) for name, tensor in call.tensors}
    name = "B" if "B" in sides else "self"
    other = max(ids.dim() for key, ids in sides.items() if key != name and key != "pivots")
    shape = next(call.shape(key) for key in sides if key not in (name, "pivots"))
    vectors = sides[name].dim() == 1 or (sides[name].dim() + 1 == other and call.shape(name) == shape[:-1])
    vectors = vectors and call.name == "_linalg_solve_ex"
    parts = [_of_matrices(ids, vectors=key == "pivots" or (key == name and vectors)) for key, ids in sides.items()]
    return [_spread(joined(*parts), output.dim()) for output in call.outputs]


def _spread(ids: Tensor, rank: int) -> Tensor:
    """Add trailing dimensions to the ids of leading dimensions."""
    if ids.dim() > rank:
        return folded(ids, range(ids.dim())).reshape([1] * rank)
    return ids.reshape([*ids.shape, *[1] * (rank - ids.dim())])


@follows("linalg_cross _softmax_backward_data _log_softmax_backward_data")
def over_one_dim(call: Call) -> Tensor:
    """Join the ids of both operands, and over the dimension that the op names."""
    both = joined(*call.all_ids())
    return folded(both, [call.get("dim")])


@follows("_cdist_forward _euclidean_dist")
def cdist(call: Call) -> Tensor:
    """Follow ``[.., P, M], [.., R, M] -> [.., P, R]``."""
    first = folded(call.ids("x1"), [-1])
    second = folded(call.ids("x2"), [-1]).transpose(-1, -2)
    return joined(first, second)


@follows("trace")
def trace(call: Call) -> Tensor:
    return folded(call.ids("self"), [0, 1], linear=True).reshape([])
