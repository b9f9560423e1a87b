"""Rules of matrix products: contractions of two operands over one dimension."""

from __future__ import annotations

from torch import Tensor

from fxgrad.proof.calls import LARGEST, Call, Undecided
from fxgrad.proof.origins import added, folded, joined, multiplied
from fxgrad.proof.rules.registry import follows


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the ids of ``a [.., m, k] @ b [.., k, n]``."""
    rows, columns = a.unsqueeze(-1), b.unsqueeze(-3)
    count = 1
    for p, q in zip(reversed(rows.shape), reversed(columns.shape), strict=False):
        count *= max(p, q)
    if count > LARGEST:
        raise Undecided("its operands are too large to be followed")
    return folded(multiplied(rows, columns), [-2], linear=True).squeeze(-2)


@follows("mm")
def mm(call: Call) -> Tensor:
    return product(call.ids("self"), call.ids("mat2"))


@follows("bmm")
def bmm(call: Call) -> Tensor:
    return product(call.ids("self"), call.ids("mat2"))


@follows("addmm")
def addmm(call: Call) -> Tensor:
    return added(call.ranked(call.ids("self")), product(call.ids("mat1"), call.ids("mat2")))


@follows("baddbmm")
def baddbmm(call: Call) -> Tensor:
    return added(call.ranked(call.ids("self")), product(call.ids("batch1"), call.ids("batch2")))


@follows("addbmm")
def addbmm(call: Call) -> Tensor:
    whole = product(call.ids("batch1"), call.ids("batch2"))
    return added(call.ranked(call.ids("self")), folded(whole, [0], linear=True).squeeze(0))


@follows("mv")
def mv(call: Call) -> Tensor:
    return product(call.ids("self"), call.ids("vec").unsqueeze(-1)).squeeze(-1)


@follows("addmv")
def addmv(call: Call) -> Tensor:
    return added(call.ids("self"), product(call.ids("mat"), call.ids("vec").unsqueeze(-1)).squeeze(-1))


@follows("dot", "vdot")
def dot(call: Call) -> Tensor:
    other = "tensor" if "tensor" in call.arguments else "other"
    return folded(multiplied(call.ids("self"), call.ids(other)), [0], linear=True).reshape([])


@follows("linear", "mkldnn_linear")
def linear(call: Call) -> Tensor:
    name = "input" if "input" in call.arguments else "self"
    source = call.ids(name)
    rows = source if source.dim() > 1 else source.unsqueeze(0)
    result = product(rows, call.ids("weight").mT)
    result = result if source.dim() > 1 else result.squeeze(0)
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
    whole = multiplied(multiplied(parts[0], parts[1]), parts[2])
    dims = call.get("sumdim")
    result = folded(whole, dims, linear=True)
    return result.squeeze(tuple(dims)) if dims else result


@follows("addr")
def outer(call: Call) -> Tensor:
    a, b = ("vec1", "vec2") if call.name == "addr" else ("self", "vec2")
    result = multiplied(call.ids(a).unsqueeze(-1), call.ids(b).unsqueeze(-2))
    return added(call.ranked(call.ids("self")), result) if call.name == "addr" else result


@follows("_grouped_mm")
def grouped_mm(call: Call) -> Tensor:
    """Join all ids; a row also depends on the offsets that assign it to a group."""
    whole = joined(
        folded(call.ids("self"), range(call.ids("self").dim())).reshape([]),
        *(folded(call.of(t), range(t.dim())).reshape([]) for n, t in call.tensors() if n != "self"),
    )
    return whole.reshape([1] * call.out_rank())
