"""Padded dimensions of reductions, norms and matrix products; along the steps, only with neutral padding."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fxgrad.proof.longest.elements import elementwise
from fxgrad.proof.longest.steps import Padded, Seen, Step, Steps, filled, steps_of
from fxgrad.proof.rules.along import dims_of

_KEPT = frozenset("amax amin max min mean any all".split())  # a reduction of one repeated number is that number
# the neutral padding of ops that work along the steps
_NOTHING: dict[str, float] = {
    **dict.fromkeys("sum nansum count_nonzero any linalg_vector_norm".split(), 0.0),
    **dict.fromkeys("prod all".split(), 1.0),
    **dict.fromkeys("amax max argmax logsumexp _softmax _log_softmax _safe_softmax".split(), -math.inf),
    **dict.fromkeys("amin min argmin".split(), math.inf),
}
_SHOW_NAN = frozenset("sum linalg_vector_norm prod logsumexp _softmax _log_softmax _safe_softmax".split())
_LEFT = {"_softmax": 0.0, "_safe_softmax": 0.0, "_log_softmax": -math.inf}
_FROM_THE_FRONT = frozenset("cumsum cumprod cummax cummin logcumsumexp".split())
_FINITE = frozenset("sum mean amax amin max min _softmax _safe_softmax any all argmax argmin".split())


def along(step: Step) -> list[Padded]:
    """Follow a reduction, cumulative or sorting op."""
    if "other" in step.call.arguments:  # max(a, b)
        return elementwise(step)
    source = step.source()
    padded = step.of(source)
    arguments = step.call.arguments
    if step.name in ("renorm", "_weight_norm_interface", "_fft_r2c", "_fft_c2r", "_fft_c2c"):
        raise Seen
    dims = dims_of(step.call, source.dim())
    if step.name == "linalg_vector_norm" and not 1 <= arguments["ord"] < math.inf:
        raise Seen
    if len(dims) > 1 and step.name in ("argmax", "argmin"):
        raise Seen
    for dim in dims:
        if dim in padded and not _blind(step, source, dim, padded[dim]):
            raise Seen
    kept = {dim: _worked(step.name, one, dim in dims) for dim, one in padded.items()}
    outputs = []
    for out in step.call.outputs:
        if out.dim() == source.dim():
            outputs.append({dim: one for dim, one in kept.items() if step.lengths.along(out.shape[dim])})
        else:
            left = [dim for dim in range(source.dim()) if dim not in dims]
            outputs.append({left.index(dim): one for dim, one in kept.items() if dim in left})
    places = [{dim: one.unknown(finite=True) for dim, one in steps.items()} for steps in outputs[1:]]
    return outputs[:1] + (places if step.name in ("max", "min") else outputs[1:])


def _blind(step: Step, source: Tensor, dim: int, steps: Steps) -> bool:
    """Decide whether an op along the steps gives the same result for any amount of padding."""
    counts = step.name in _FROM_THE_FRONT | {"argmax", "argmin", "max", "min"}
    if counts and not step.front(source, dim):
        return False
    if step.name in _FROM_THE_FRONT:
        return True
    return steps.number == _NOTHING.get(step.name, math.nan) and (steps.sure or step.name in _SHOW_NAN)


def _worked(name: str, steps: Steps, worked: bool) -> Steps:
    """Return the steps of an output; ``worked`` if the op works along them."""
    if worked:
        result = steps.unknown(finite=name in _LEFT and _LEFT[name] == 0)
        return replace(result, number=_LEFT.get(name), sure=False)
    same = name in _KEPT or (name in ("sum", "nansum", "count_nonzero", "linalg_vector_norm") and steps.number == 0)
    result = steps.unknown(finite=steps.safe and name in _FINITE)
    shown = steps.sure or name in ("sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm")
    known = same and shown and not (name == "mean" and steps.number == 1)
    return replace(result, number=steps.number, sure=steps.sure) if known else result


@steps_of("native_layer_norm _fused_rms_norm")
def _layer_norm(step: Step) -> list[Padded]:
    step.only("input")
    source = step.call.arguments["input"]
    padded = step.of(source)
    if any(dim >= source.dim() - len(step.call.arguments["normalized_shape"]) for dim in padded):
        raise Seen
    apart = (step.call.arguments["eps"] or 0) > 0
    result = {dim: one.unknown(finite=one.safe and apart) for dim, one in padded.items()}
    return [result] * len(step.call.outputs)


@steps_of("mm addmm linear mv")
def _rows(step: Step) -> list[Padded]:
    """Multiply each row of the first operand with the whole second operand."""
    name = {"mm": "self", "mv": "self", "addmm": "mat1", "linear": "input"}[step.name]
    step.only(name)
    source = step.call.arguments[name]
    padded = step.of(source)
    if source.dim() - 1 in padded:
        raise Seen
    alone = step.name in ("mm", "mv") or (step.name == "linear" and not step.call.has("bias"))
    return [{dim: _product(one, zero=alone and one.number == 0, finite=one.safe) for dim, one in padded.items()}]


def _zeros(a: Steps, b: Steps) -> bool:
    """Decide whether products of two paddings are zero."""
    return (a.number == 0 and b.safe) or (b.number == 0 and a.safe)


def _product(steps: Steps, *, zero: bool, finite: bool) -> Steps:
    return filled(steps, 0.0, sure=False) if zero else steps.unknown(finite=finite)


@steps_of("bmm")
def _bmm(step: Step) -> list[Padded]:
    """Follow ``[n, i, k] @ [n, k, j]``; along k, one padding must be zero and the other finite."""
    a, b = (step.of(step.call.arguments[name]) for name in ("self", "mat2"))
    if (2 in a) != (1 in b):
        raise Seen
    if 2 in a and not (_zeros(a[2], b[1]) and a[2].alike(b[1])):
        raise Seen
    padded: Padded = {}
    if 0 in a or 0 in b:
        if 0 not in a or 0 not in b or not a[0].alike(b[0]):
            raise Seen
        padded[0] = _product(a[0], zero=_zeros(a[0], b[0]), finite=a[0].safe and b[0].safe)
    for dim, steps in ((1, a.get(1)), (2, b.get(2))):
        if steps is not None:
            padded[dim] = _product(steps, zero=steps.number == 0, finite=steps.safe)
    return [padded]
