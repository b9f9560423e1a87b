"""Steps at another place: views, parts, and places that tensors name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor

from fxgrad.independence.calls import NO_END
from fxgrad.independence.longest.elements import operand
from fxgrad.independence.longest.steps import (
    Padded,
    Seen,
    Step,
    Steps,
    expr,
    filled,
    is_one,
    single,
    steps_of,
)


@steps_of("permute transpose t unsqueeze squeeze expand select unbind")
def _moved(step: Step) -> list[Padded]:
    source, out = step.source(), step.call.outputs[0]
    own = step.of(source)
    found = {}
    for dim, origin in enumerate(_origins(step, source, out)):
        if origin in own:
            found[dim] = own[origin]
        elif step.lengths.along(out.shape[dim]):  # the same for every step
            found[dim] = step.new(out.shape[dim], number=operand(step.call, source, None), finite=True)
    return [found] * len(step.call.outputs)


def _origins(step: Step, source: Tensor, out: Tensor) -> list[int]:
    """The source's dimension that each dimension of the output is; -1 for new ones."""
    given, rank = step.call.arguments, source.dim()
    dims = list(range(rank))
    if step.name == "permute":
        return [dim % rank for dim in given["dims"]]
    if step.name in ("transpose", "t"):
        a, b = (given["dim0"] % rank, given["dim1"] % rank) if step.name == "transpose" else (0, rank - 1)
        dims[a], dims[b] = dims[b], dims[a]
    elif step.name == "unsqueeze":
        dims.insert(given["dim"] % (rank + 1), -1)
    elif step.name == "squeeze":
        which = step.call.dims("dim", rank) if "dim" in given else dims
        dims = [dim for dim in dims if dim not in which or not is_one(source.shape[dim])]
    elif step.name == "expand":
        dims = [-1] * (out.dim() - rank) + dims
    else:
        (gone,) = step.call.dims("dim", rank)
        if gone in step.of(source) and not _first(step, gone, source):
            raise Seen
        dims.remove(gone)
    return dims


def _first(step: Step, dim: int, source: Tensor) -> bool:
    """``x[0]``, and ``x[-1]`` where that is each sample's own last step."""
    index = step.call.arguments.get("index")
    if step.name != "select" or type(index) is not int or not step.front(source, dim):
        return False
    one = step.of(source)[dim]
    return index == 0 or (index == -1 and one.stays and one.inner == 1)


@steps_of("view _unsafe_view reshape")
def _viewed(step: Step) -> list[Padded]:
    """Elements keep their order: each step goes to the one dimension that holds all of it."""
    source, out = step.source(), step.call.outputs[0]
    found: Padded = {}
    for dim, one in step.of(source).items():
        inner = one.inner * _product(source.shape[dim + 1 :])
        held = [new for new in step.dims(out) if _holds(one.length * inner, inner, out.shape, new)]
        (new,) = held
        if new in found:
            raise Seen
        found[new] = replace(one, inner=sympy.cancel(inner / _product(out.shape[new + 1 :])))
    return [found]


def _holds(whole: Any, inner: Any, shape: Sequence[Any], dim: int) -> bool:
    behind = _product(shape[dim + 1 :])
    return _whole(inner / behind) and _whole(behind * expr(shape[dim]) / whole)


def _whole(ratio: Any) -> bool:
    """Whether a quotient of sizes is a whole number whatever they are."""
    return bool(sympy.fraction(sympy.cancel(ratio))[1] == 1)


def _product(sizes: Sequence[Any]) -> Any:
    return sympy.prod([expr(size) for size in sizes])


@steps_of("slice")
def _slice(step: Step) -> list[Padded]:
    """``x[a:]``, ``x[:1]``"""
    given, source, out = step.call.arguments, step.source(), step.call.outputs[0]
    (dim,) = step.call.dims("dim", source.dim())
    own = step.of(source)
    start, end = given["start"] or 0, given["end"]
    if dim in own:
        if own[dim].inner != 1 or not step.front(source, dim) or type(start) is not int or start < 0:
            raise Seen
        steps = own.pop(dim)
        if goes_on(end, source.shape[dim]) and given["step"] == 1:
            own[dim] = replace(steps, length=expr(out.shape[dim]), places=steps.places and start == 0)
        elif step.lengths.lone(out.shape[dim]) and start == 0 and given["step"] == 1 and type(end) is int:
            own[dim] = Steps(expr(out.shape[dim]))  # one less than a recurrence has states
        elif (start, end) != (0, 1) or not step.lengths.lone(source.shape[dim]):
            raise Seen
    return [own]


def whole(given: Any, size: Any) -> bool:
    """Whether a slice is all of its source."""
    return given["start"] in (0, None) and given["step"] == 1 and goes_on(given["end"], size)


def goes_on(end: Any, size: Any) -> bool:
    """Whether a slice ends where its source does."""
    return end is None or (type(end) is int and end >= NO_END) or (type(end) is not int and expr(end) == expr(size))


@steps_of("flip roll index_select split split_with_sizes constant_pad_nd")
def _other_dims(step: Step) -> list[Padded]:
    """Along other dimensions, with nothing new at any step but what is put in front or behind."""
    source = step.source()
    own = step.of(source)
    step.only("self")
    if step.name == "constant_pad_nd":
        worked = [source.dim() - 1 - i // 2 for i, width in enumerate(step.call.arguments["pad"]) if width != 0]
        value = step.call.arguments.get("value") or 0
        own = {dim: one if one.number == value else one.unknown(finite=one.safe) for dim, one in own.items()}
    else:
        name = "dims" if "dims" in step.call.arguments else "dim"
        worked = step.call.dims(name, source.dim())
    if not own.keys().isdisjoint(worked):
        raise Seen
    return [{dim: replace(one, places=False) for dim, one in own.items()}] * len(step.call.outputs)


@steps_of("cat stack")
def _joined(step: Step) -> list[Padded]:
    out = step.call.outputs[0]
    parts = [part for part in step.call.arguments["tensors"] if part.dim() == out.dim() - (step.name == "stack")]
    (dim,) = step.call.dims("dim", out.dim())
    several = [step.of(part) for part in parts]
    found: Padded = {}
    for at in step.dims(out):
        if at == dim:
            raise Seen
        own = [one[at - (step.name == "stack" and at > dim)] for one in several]
        if any((one.length, one.inner) != (own[0].length, own[0].inner) for one in own):
            raise Seen
        same = all(one.number == own[0].number for one in own)
        found[at] = own[0].unknown(finite=all(one.safe for one in own))
        if same:
            found[at] = replace(found[at], number=own[0].number, sure=all(one.sure for one in own))
    return [found]


@steps_of("gather")
def _gather(step: Step) -> list[Padded]:
    """No index of it counts from the end."""
    source = step.source()
    (dim,) = step.call.dims("dim", source.dim())
    if dim in step.of(source) and not step.front(source, dim):
        raise Seen
    return [{dim: one.unknown() for dim, one in step.of(step.call.arguments["index"]).items()}]


@steps_of("index")
def _index(step: Step) -> list[Padded]:
    source, indices = step.source(), step.call.arguments["indices"]
    if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices):
        raise Seen
    for tensor in (source, *(one for one in indices if one is not None)):
        if not all(step.front(tensor, dim) for dim in step.of(tensor)):
            raise Seen
    for dim, one in enumerate(indices):
        if one is not None and dim in step.of(source) and not (_least(step, one) >= 0):
            raise Seen  # it may count from the end
    out = step.call.outputs[0]
    return [{dim: step.new(out.shape[dim]) for dim in step.dims(out)}]


def _least(step: Step, index: Tensor) -> float:
    least = step.call.origins(index).least
    return -math.inf if least is None else least


@steps_of("embedding")
def _embedding(step: Step) -> list[Padded]:
    step.only("indices")
    return [{dim: one.unknown(finite=True) for dim, one in step.of(step.call.arguments["indices"]).items()}]


@steps_of("index_put")
def _index_put(step: Step) -> list[Padded]:
    """``x[mask] = 0``"""
    source, given = step.source(), step.call.arguments
    (mask,), value = given["indices"], given["values"]
    if mask is None or mask.dtype is not torch.bool or not single(value) or given["accumulate"]:
        raise Seen
    into, where = step.of(source), step.of(mask)
    number = operand(step.call, value, None)
    found = {}
    for dim, one in into.items():
        there = where.get(dim)
        known = there is not None and (there.length, there.inner) == (one.length, one.inner)
        written = there.number if known and there is not None else None
        found[dim] = filled(one, number) if written == 1 else one if written == 0 else one.unknown()
    return [found]


@steps_of("slice_scatter select_scatter")
def _written(step: Step) -> list[Padded]:
    """Into all of it, into a part of another dimension, or at the first step."""
    source, given = step.source(), step.call.arguments
    own, (dim,) = step.of(source), step.call.dims("dim", source.dim())
    if step.name == "slice_scatter" and whole(given, source.shape[dim]):
        return [step.of(given["src"])]
    if dim in own:
        place = given["index"] if step.name == "select_scatter" else (given["start"] or 0, given["end"])
        if place not in (0, (0, 1)) or not step.lengths.lone(source.shape[dim]):
            raise Seen
        return [{at: one if at == dim else one.unknown() for at, one in own.items()}]
    return [{at: one.unknown() for at, one in own.items()}]
