"""Layouts of ops over some dims of their operands, such as matrix ops and FFTs, which batch over all other dims.

The batch dims lead, broadcast as usual, and lead in the result. If an op names its dims and keeps them (fft), the batch
dims keep their positions. Samples on a dim that the op works over influence each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fxgrad.ops.worked_dims import EVERY, OVER_LAST, OVER_NAMED
from fxgrad.samples.operands import Answer, Mixes, Op, Operand, by_shape
from fxgrad.samples.symbols import expression


def over_dims(op: Op, output: Tensor) -> Answer:
    """Require samples at the same batch dim in all operands and in the result."""
    worked = {operand: worked_dims(op, operand) for operand in op.operands}
    if any(layout.dim in worked[operand] for operand, layout in op.batched):
        return Mixes("it works along the sample dimension")
    answer = by_shape(op, output)
    if isinstance(answer, Mixes):
        return answer
    free = max(operand.fake.dim() - len(worked[operand]) for operand in op.operands)
    if op.call.op in OVER_NAMED or op.call.op == "renorm":
        operand, _ = next(iter(op.batched))
        kept = _others(output.dim(), worked[operand]) if output.dim() == operand.fake.dim() else []
    else:
        kept = list(range(free))
    if answer.dim not in kept:
        return Mixes("its result holds the samples on a dimension that it works along")
    place = kept.index(answer.dim) - len(kept)
    for operand, layout in op.batched:
        if operand.place(worked[operand]) != place or layout.at(0) != answer.at(0):
            return Mixes("its operands hold the samples in different places")
    return answer


def _others(ndim: int, worked: Iterable[int]) -> list[int]:
    return [dim for dim in range(ndim) if dim not in worked]


def worked_dims(op: Op, operand: Operand) -> Sequence[int]:
    """Return the dims of an operand that the op works over."""
    ndim, name = operand.fake.dim(), op.call.op
    if name == "renorm":  # each slice at an index of `dim` has its own norm
        return _others(ndim, op.dims("dim", ndim) or ())
    if name in OVER_NAMED:
        return _named(op, operand)
    last = OVER_LAST[name]
    count = last.get(operand.name, last.get(EVERY, 0))
    if name in _SOLVES and operand.name in ("B", "b", "other") and _is_vector(op, operand):
        count = 1
    return operand.last_dims(count)


def _is_vector(op: Op, right: Operand) -> bool:
    """Decide whether the right side is a vector for each matrix, as torch.linalg.solve does."""
    a = op.operand("A") or op.operand("input")
    if right.fake.dim() == 1 or a is None:
        return True
    sizes, matrix = ([expression(size) for size in t.shape] for t in (right.fake, a.fake))
    return a.fake.dim() - 1 == right.fake.dim() and sizes == matrix[:-1]


def _named(op: Op, operand: Operand) -> Sequence[int]:
    """Return the dims that the call names, by the conventions of torch.fft."""
    ndim = operand.fake.dim()
    count, sizes = OVER_NAMED[op.call.op], op.call.get("s")
    if count is None:
        count = len(sizes) if isinstance(sizes, tuple | list) else ndim
    named = op.dims("dim", ndim)
    return operand.last_dims(count) if named is None else named


_SOLVES = frozenset({"linalg_solve", "linalg_solve_ex", "_linalg_solve_ex", "linalg_lstsq"})
