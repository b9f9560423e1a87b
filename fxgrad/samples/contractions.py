"""Layouts of matrix products and einsums."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxgrad.ops.equation import Equation
from fxgrad.samples.layouts import Layout
from fxgrad.samples.operands import Answer, Mixes, Op, Operand, by_shape


def contraction(op: Op, output: Tensor) -> Answer:
    """Follow a matrix product; the contracted dim may not hold samples, and the batch dims broadcast as in matmul."""
    if op.call.op == "einsum":
        return _einsum(op, output)
    if op.call.op not in _CONTRACTED:
        return Mixes("fxgrad does not know which of its dims are contracted")
    summed = {layout.dim in _contracted_dims(op, operand) for operand, layout in op.batched}
    if True in summed:  # Σ_n a_n b_n, a contraction over the samples of all operands
        alike = len({layout.at(0) for _, layout in op.batched}) == 1
        return Mixes("it sums over the sample dimension", linear=summed == {True} and alike and op.call.op in _SUMS)
    answer = by_shape(op, output)
    if isinstance(answer, Mixes):
        return answer
    return _lined_up(op, output, answer)


def _contracted_dims(op: Op, operand: Operand) -> Sequence[int]:
    """Return the dims of an operand that a product contracts; a vector's only dim in any position."""
    ndim, dims = operand.fake.dim(), _CONTRACTED[op.call.op].get(operand.name, ())
    if op.call.op != "tensordot":
        return [max(dim, -ndim) % ndim for dim in dims]
    pair = op.call.get("dims")
    if isinstance(pair, int):
        return range(ndim - pair, ndim) if operand.name == "a" else range(pair)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return range(ndim)
    return [dim % ndim for dim in pair[operand.name == "b"]]


def _lined_up(op: Op, output: Tensor, answer: Layout) -> Answer:
    """Check that the operands' batch dims (all but the last two) align from the right."""
    vector = any(operand.fake.dim() == 1 for operand in op.operands)
    for operand, layout in op.batched:
        if layout.at(0) != answer.at(0):
            return Mixes("its operands hold the samples in different orders")
        place = layout.dim - operand.fake.dim()
        if op.call.op not in ("matmul", "rmatmul"):
            continue
        right = operand.name == ("other" if op.call.op == "matmul" else "input")
        moves = vector and not (right and place == -1)  # the result lacks one of the last two dims
        if place + moves != answer.dim - output.dim():
            return Mixes("its operands hold the samples in different places")
    return answer


_SUMS = frozenset("matmul rmatmul mm bmm mv dot vdot inner".split())  # contractions of one dim of both operands

_CONTRACTED: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"input": (-1,), "weight": (-1,)},
    "matmul": {"input": (-1,), "other": (-2,)},
    "rmatmul": {"input": (-2,), "other": (-1,)},
    "mm": {"input": (1,), "mat2": (0,)},
    "bmm": {"input": (2,), "mat2": (1,)},
    "addmm": {"mat1": (1,), "mat2": (0,)},
    "baddbmm": {"batch1": (2,), "batch2": (1,)},
    "mv": {"input": (1,), "vec": (0,)},
    "addmv": {"mat": (1,), "vec": (0,)},
    "dot": {"input": (0,), "tensor": (0,)},
    "vdot": {"input": (0,), "other": (0,)},
    "inner": {"input": (-1,), "other": (-1,)},
    "ger": {},
    "outer": {},
    "addr": {},
    "bilinear": {"input1": (-1,), "input2": (-1,)},
    "addbmm": {"batch1": (0, 2), "batch2": (0, 1)},
    "tensordot": {},
    "cdist": {"x1": (-1,), "x2": (-1,)},
}


def _einsum(op: Op, output: Tensor) -> Answer:
    equation = op.call.arguments["equation"]
    read = Equation.of(equation) if isinstance(equation, str) else None
    if read is None or read.output is None:
        return by_shape(op, output)
    places = set()  # the letter of each sample dimension that is not behind dots
    for operand, layout in op.batched:
        for node, letters in zip(op.call.arguments["operands"], read.inputs, strict=True):
            name = letters.names(operand.fake.dim())[layout.dim] if node is operand.node else ""
            if name in list(letters.letters):
                places.add((name, layout.at(0)))
    if any(name not in read.output.letters for name, _ in places):  # Σ_n a_n b_n, over the samples of all operands
        return Mixes("it sums over the sample dimension", linear=len(places) == 1)
    return by_shape(op, output)
