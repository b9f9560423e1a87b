"""Ops that work over some dims of their operands, matrices most often, and treat every slice along the others alone.

The other dims stand in front, broadcast as everywhere, and come out in front; or, where an op names its dims and
keeps them (fft), they stay where they are. Samples on a dim that is worked over meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fxgrad.samples.operands import Answer, Mixes, Op, Operand, by_shape
from fxgrad.samples.symbols import expression
from fxgrad.samples.worked_dims import EVERY, OVER_LAST, OVER_NAMED


def over_dims(op: Op, output: Tensor) -> Answer:
    """Samples are on no dim that is worked over, at one place among the others in all operands and in the result."""
    worked = {operand: worked_dims(op, operand) for operand in op.operands}
    for operand, layout in op.batched:
        if layout.dim in worked[operand]:
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
        others = _others(operand.fake.dim(), worked[operand])
        if others.index(layout.dim) - len(others) != place or layout.at(0) != answer.at(0):
            return Mixes("its operands hold the samples in different places")
    return answer


def _others(ndim: int, worked: Iterable[int]) -> list[int]:
    return [dim for dim in range(ndim) if dim not in worked]


def worked_dims(op: Op, operand: Operand) -> Sequence[int]:
    """The dims of an operand that the op works over."""
    ndim, name = operand.fake.dim(), op.call.op
    if name == "renorm":  # each slice at an index of `dim` has its own norm
        return _others(ndim, op.dims("dim", ndim) or ())
    if name in OVER_NAMED:
        return _named(op, ndim)
    last = OVER_LAST[name]
    count = last.get(operand.name, last.get(EVERY, 0))
    if name in _SOLVES and operand.name in ("B", "b", "other") and _is_vector(op, operand):
        count = 1
    return range(max(ndim - count, 0), ndim)


def _is_vector(op: Op, right: Operand) -> bool:
    """Whether the right side is a vector for each matrix, as torch.linalg.solve decides it."""
    a = op.operand("A") or op.operand("input")
    if right.fake.dim() == 1 or a is None:
        return True
    sizes, matrix = ([expression(size) for size in t.shape] for t in (right.fake, a.fake))
    return a.fake.dim() - 1 == right.fake.dim() and sizes == matrix[:-1]


def _named(op: Op, ndim: int) -> Sequence[int]:
    """The dims that the call names, as torch.fft understands it."""
    named = op.dims("dim", ndim)
    if named is not None:
        return named
    count, sizes = OVER_NAMED[op.call.op], op.call.get("s")
    if count is None:
        count = len(sizes) if isinstance(sizes, tuple | list) else ndim
    return range(max(ndim - count, 0), ndim)


_SOLVES = frozenset({"linalg_solve", "linalg_solve_ex", "_linalg_solve_ex", "linalg_lstsq"})
