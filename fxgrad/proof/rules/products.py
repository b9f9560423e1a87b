"""Rules of matrix products: contractions of two operands over one dimension."""

from __future__ import annotations

import math

from torch import Tensor

from fxgrad.proof.calls import LARGEST, Call, Undecided
from fxgrad.proof.origins import added, folded, joined, multiplied, total, whole
from fxgrad.proof.rules.registry import follows


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the ids of ``a [.., m, k] @ b [.., k, n]``."""
    rows, columns = a.unsqueeze(-1), b.unsqueeze(-3)
    if math.prod(map(max, reversed(rows.shape), reversed(columns.shape))) > LARGEST:
        raise Undecided("its operands are too large to be followed")
    return folded(multiplied(rows, columns), [-2], linear=True).squeeze(-2)


@follows("mm bmm")
def mm(call: Call) -> Tensor:
    return product(call.ids("self"), call.ids("mat2"))


@follows("addmm baddbmm")
def addmm(call: Call) -> Tensor:
    first, second = ("mat1", "mat2") if call.name == "addmm" else ("batch1", "batch2")
    return added(call.ranked(call.ids("self")), product(call.ids(first), call.ids(second)))


@follows("addbmm")
def addbmm(call: Call) -> Tensor:
    products = product(call.ids("batch1"), call.ids("batch2"))
    return added(call.ranked(call.ids("self")), folded(products, [0], linear=True).squeeze(0))


@follows("mv")
def mv(call: Call) -> Tensor:
    return product(call.ids("self"), call.ids("vec").unsqueeze(-1)).squeeze(-1)


@follows("addmv")
def addmv(call: Call) -> Tensor:
    return added(call.ids("self"), product(call.ids("mat"), call.ids("vec").unsqueeze(-1)).squeeze(-1))


@follows("dot vdot")
def dot(call: Call) -> Tensor:
    other = "tensor" if "tensor" in call.arguments else "other"
    return total(multiplied(call.ids("self"), call.ids(other)))


@follows("linear mkldnn_linear")
def linear(call: Call) -> Tensor:
    source = call.ids("input" if "input" in call.arguments else "self")
    result = product(source.reshape([1] * (2 - source.dim()) + list(source.shape)), call.ids("weight").mT)
    result = result.squeeze(0) if source.dim() == 1 else result
    return added(result, call.ids("bias")) if call.has("bias") else result


@follows("_trilinear")
def trilinear(call: Call) -> Tensor:
    """Follow ``Σ a b c`` over some dimensions, after each operand gets its expanded dimensions."""
    parts = []
    for i in (1, 2, 3):
        ids = call.ids(f"i{i}")
        for dim in sorted(call.get(f"expand{i}")):
            ids = ids.unsqueeze(dim)
        parts.append(ids)
    dims = call.get("sumdim")
    result = folded(multiplied(multiplied(parts[0], parts[1]), parts[2]), dims, linear=True)
    return result.squeeze(tuple(dims)) if dims else result


@follows("addr")
def outer(call: Call) -> Tensor:
    result = multiplied(call.ids("vec1").unsqueeze(-1), call.ids("vec2").unsqueeze(-2))
    return added(call.ranked(call.ids("self")), result)


@follows("_grouped_mm")
def grouped_mm(call: Call) -> Tensor:
    """Join all ids; a row also depends on the offsets that assign it to a group."""
    return joined(*map(whole, call.all_ids())).reshape([1] * call.out_rank())
