"""Padded dimensions of views, slices, concatenation and indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor

from fxgrad.proof.calls import NO_END
from fxgrad.proof.longest.elements import operand
from fxgrad.proof.longest.steps import Padded, Seen, Step, Steps, expr, filled, is_one, single, steps_of


@steps_of("permute transpose t unsqueeze squeeze expand select unbind")
def _moved(step: Step) -> list[Padded]:
    """Move padded dimensions with the op."""
    source, out = step.source(), step.call.outputs[0]
    padded = step.of(source)
    result = {}
    for dim, origin in enumerate(_origins(step, source, out)):
        if origin in padded:
            result[dim] = padded[origin]
        elif step.lengths.along(out.shape[dim]):  # a broadcast: equal at every step
            result[dim] = step.new(out.shape[dim], number=operand(step.call, source, None), finite=True)
    return [result] * len(step.call.outputs)


def _origins(step: Step, source: Tensor, out: Tensor) -> list[int]:
    """Return the source dimension of each output dimension; -1 for a new one, or one of size 1."""
    rank, arguments = source.dim(), step.call.arguments
    if step.name == "expand":
        return [-1] * (out.dim() - rank) + list(range(rank))
    if step.name in ("select", "unbind"):
        (gone,) = step.call.dims("dim", rank)
        if gone in step.of(source) and not _first(step, gone, source):
            raise Seen
    # each dimension gets a size of its own
    marked = torch.empty([1 if is_one(size) else dim + 2 for dim, size in enumerate(source.shape)], device="meta")
    result = step.call.run({"self": marked, **({"index": 0} if "index" in arguments else {})})
    moved = result[0] if isinstance(result, tuple | list) else result
    return [size - 2 for size in moved.shape]


def _first(step: Step, dim: int, source: Tensor) -> bool:
    """Decide whether a select is ``x[0]``, or ``x[-1]`` where that is the last step of each sample."""
    index = step.call.arguments.get("index")
    if step.name != "select" or type(index) is not int or not step.front(source, dim):
        return False
    steps = step.of(source)[dim]
    return index == 0 or (index == -1 and steps.stays and steps.inner == 1)


@steps_of("view _unsafe_view reshape")
def _viewed(step: Step) -> list[Padded]:
    """Follow a view; the steps go to the one dimension that contains them whole."""
    source, out = step.source(), step.call.outputs[0]
    padded: Padded = {}
    for dim, steps in step.of(source).items():
        inner = steps.inner * _product(source.shape[dim + 1 :])
        containing = [new for new in step.dims(out) if _holds(steps.length * inner, inner, out.shape, new)]
        (new,) = containing
        if new in padded:
            raise Seen
        padded[new] = replace(steps, inner=sympy.cancel(inner / _product(out.shape[new + 1 :])))
    return [padded]


def _holds(whole: Any, inner: Any, shape: Sequence[Any], dim: int) -> bool:
    """Decide whether a dimension contains steps of ``inner`` elements, ``whole`` in all."""
    behind = _product(shape[dim + 1 :])
    return _whole(inner / behind) and _whole(behind * expr(shape[dim]) / whole)


def _whole(ratio: Any) -> bool:
    """Decide whether a quotient of sizes is an integer for all sizes."""
    return bool(sympy.fraction(sympy.cancel(ratio))[1] == 1)


def _product(sizes: Sequence[Any]) -> Any:
    return sympy.prod([expr(size) for size in sizes])


@steps_of("slice")
def _slice(step: Step) -> list[Padded]:
    """Follow a slice such as ``x[a:]`` or ``x[:1]``."""
    arguments, source, out = step.call.arguments, step.source(), step.call.outputs[0]
    (dim,) = step.call.dims("dim", source.dim())
    padded = step.of(source)
    start, end = arguments["start"] or 0, arguments["end"]
    if dim in padded:
        if padded[dim].inner != 1 or not step.front(source, dim) or type(start) is not int or start < 0:
            raise Seen
        steps = padded.pop(dim)
        if goes_on(end, source.shape[dim]) and arguments["step"] == 1:
            padded[dim] = replace(steps, length=expr(out.shape[dim]), places=steps.places and start == 0)
        elif step.lengths.lone(out.shape[dim]) and start == 0 and arguments["step"] == 1 and type(end) is int:
            padded[dim] = Steps(expr(out.shape[dim]))  # the states of a recurrence without the last one
        elif (start, end) != (0, 1) or not step.lengths.lone(source.shape[dim]):
            raise Seen
    return [padded]


def whole(arguments: Any, size: Any) -> bool:
    """Decide whether a slice is its whole source."""
    start, step = arguments["start"], arguments["step"]  # symbols, where they are read from data: not the whole
    known = all(number is None or type(number) is int for number in (start, step))
    return known and start in (0, None) and step == 1 and goes_on(arguments["end"], size)


def goes_on(end: Any, size: Any) -> bool:
    """Decide whether a slice ends at the end of its source."""
    return end is None or (type(end) is int and end >= NO_END) or (type(end) is not int and expr(end) == expr(size))


@steps_of("flip roll index_select split split_with_sizes constant_pad_nd")
def _other_dims(step: Step) -> list[Padded]:
    """Follow an op along other dimensions; at each step it adds no values except those of a pad."""
    source = step.source()
    padded = step.of(source)
    step.only("self")
    if step.name == "constant_pad_nd":
        worked = [source.dim() - 1 - i // 2 for i, width in enumerate(step.call.arguments["pad"]) if width != 0]
        value = step.call.arguments.get("value") or 0
        padded = {dim: one if one.number == value else one.unknown(finite=one.safe) for dim, one in padded.items()}
    else:
        name = "dims" if "dims" in step.call.arguments else "dim"
        worked = step.call.dims(name, source.dim())
    if not padded.keys().isdisjoint(worked):
        raise Seen
    return [{dim: replace(one, places=False) for dim, one in padded.items()}] * len(step.call.outputs)


@steps_of("cat stack")
def _joined(step: Step) -> list[Padded]:
    out = step.call.outputs[0]
    parts = [part for part in step.call.arguments["tensors"] if part.dim() == out.dim() - (step.name == "stack")]
    (dim,) = step.call.dims("dim", out.dim())
    several = [step.of(part) for part in parts]
    padded: Padded = {}
    for at in step.dims(out):
        if at == dim:
            raise Seen
        pieces = [one[at - (step.name == "stack" and at > dim)] for one in several]
        if not all(map(pieces[0].alike, pieces)):
            raise Seen
        same = all(one.number == pieces[0].number for one in pieces)
        padded[at] = pieces[0].unknown(finite=all(one.safe for one in pieces))
        if same:
            padded[at] = replace(padded[at], number=pieces[0].number, sure=all(one.sure for one in pieces))
    return [padded]


@steps_of("gather")
def _gather(step: Step) -> list[Padded]:
    """Follow a gather, in which no index counts from the end."""
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
            raise Seen  # a negative index counts from the end
    out = step.call.outputs[0]
    return [{dim: step.new(out.shape[dim]) for dim in step.dims(out)}]


def _least(step: Step, index: Tensor) -> float:
    least = step.call.facts.of(index).least
    return -math.inf if least is None else least


@steps_of("embedding")
def _embedding(step: Step) -> list[Padded]:
    step.only("indices")
    return [{dim: one.unknown(finite=True) for dim, one in step.of(step.call.arguments["indices"]).items()}]


@steps_of("index_put")
def _index_put(step: Step) -> list[Padded]:
    """Follow ``x[mask] = number``."""
    source, arguments = step.source(), step.call.arguments
    (mask,), value = arguments["indices"], arguments["values"]
    if mask is None or mask.dtype is not torch.bool or not single(value) or arguments["accumulate"]:
        raise Seen
    into, where = step.of(source), step.of(mask)
    number = operand(step.call, value, None)
    padded = {}
    for dim, steps in into.items():
        there = where.get(dim)
        written = there.number if there is not None and there.alike(steps) else None
        padded[dim] = filled(steps, number) if written == 1 else steps if written == 0 else steps.unknown()
    return [padded]


@steps_of("slice_scatter select_scatter")
def _written(step: Step) -> list[Padded]:
    """Follow a write to the whole tensor, to a slice of another dimension, or to the first step."""
    source, arguments = step.source(), step.call.arguments
    padded, (dim,) = step.of(source), step.call.dims("dim", source.dim())
    if step.name == "slice_scatter" and whole(arguments, source.shape[dim]):
        return [step.of(arguments["src"])]
    if dim in padded:
        place = arguments["index"] if step.name == "select_scatter" else (arguments["start"] or 0, arguments["end"])
        if place not in (0, (0, 1)) or not step.lengths.lone(source.shape[dim]):
            raise Seen
        return [{at: one if at == dim else one.unknown() for at, one in padded.items()}]
    return [{at: one.unknown() for at, one in padded.items()}]
