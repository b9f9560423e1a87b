"""Each step alone: elementwise ops, and tensors of one number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxgrad.independence.calls import Call
from fxgrad.independence.longest.steps import (
    WIDE,
    Padded,
    Seen,
    Step,
    Steps,
    filled,
    is_one,
    single,
    steps_of,
)

# ops that are finite where their operands are
_TOTAL = frozenset(
    """add sub rsub mul neg abs sign tanh sigmoid relu gelu silu mish elu celu leaky_relu hardtanh hardswish hardsigmoid
    log_sigmoid_forward sin cos erf atan clamp clamp_min clamp_max where masked_fill maximum minimum _to_copy clone
    detach alias copy native_dropout square""".split()
)
_SAME = frozenset("_to_copy clone detach alias".split())


def elementwise(step: Step) -> list[Padded]:
    operands = [tensor for _, tensor in step.call.tensors()]
    found = []
    for i, out in enumerate(step.call.outputs):
        own = {}
        for dim in step.dims(out):
            at = {id(tensor): _at(step, tensor, dim - out.dim()) for tensor in operands}
            own[dim] = _value(step, i, at)
        found.append(own)
    return found


def _at(step: Step, tensor: Tensor, back: int) -> Steps | None:
    """An operand's steps along a dimension counted from the last; None where it has one element for all of them."""
    dim = tensor.dim() + back
    if dim < 0 or is_one(tensor.shape[dim]):
        return None
    return step.of(tensor)[dim]


def _value(step: Step, i: int, at: dict[int, Steps | None]) -> Steps:
    known = [one for one in at.values() if one is not None]
    first = known[0]
    if any((one.length, one.inner) != (first.length, first.inner) for one in known):
        raise Seen
    out = step.call.outputs[i]
    number = _number(step, i, at)
    leaves = torch.utils._pytree.tree_leaves(dict(step.call.arguments))
    numbers = all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, float))
    total = step.name in _TOTAL and numbers and all(one is None or one.safe for one in at.values())
    finite = total or not out.dtype.is_floating_point or (number is not None and math.isfinite(number))
    places = step.name in _SAME and first.places and out.dtype in WIDE
    return Steps(first.length, first.inner, number, finite, places)


def _number(step: Step, i: int, at: dict[int, Steps | None]) -> float | None:
    call, name = step.call, step.name
    given = call.arguments
    numbers = {id(tensor): operand(call, tensor, at[id(tensor)]) for _, tensor in call.tensors()}
    if name in ("lt", "ge", "gt", "le"):
        inside = _inside(step, at)
        if inside is not None:
            return inside
    if name == "where" and numbers[id(given["condition"])] is not None:
        chosen = given["self"] if numbers[id(given["condition"])] else given["other"]
        return numbers[id(chosen)] if isinstance(chosen, Tensor) else None
    if name == "masked_fill" and numbers[id(given["mask"])] is not None:
        chosen = given["value"] if numbers[id(given["mask"])] else given["self"]
        return numbers[id(chosen)] if isinstance(chosen, Tensor) else float(chosen)
    if name == "copy":
        return numbers[id(given["src"])]
    if name == "native_dropout":
        return 0.0 if i == 0 and numbers[id(given["input"])] == 0 else None
    if None not in numbers.values():
        return _computed(call, i, numbers)
    return _absorbed(name, given, at, numbers)


def operand(call: Call, tensor: Tensor, steps: Steps | None) -> float | None:
    """What an operand has behind the end of each sample."""
    if steps is not None:
        return steps.number
    known = call.origins(tensor).known
    if known is None or not single(tensor) or known.varies(call.trial):
        return None
    return float(known.value(call.trial))




def _inside(step: Step, at: dict[int, Steps | None]) -> float | None:
    """``arange(longest) < lengths``: true up to the end of each sample."""
    given = step.call.arguments
    places, ends = (given["self"], given["other"]) if step.name in ("lt", "ge") else (given["other"], given["self"])
    if not isinstance(places, Tensor) or not isinstance(ends, Tensor):
        return None
    steps, pack = at[id(places)], step.call.origins(ends).ends
    if steps is None or not steps.places or at[id(ends)] is not None or pack is None:
        return None
    if steps.inner != 1 or step.lengths.pack(steps.length) != pack:
        return None
    return 0.0 if step.name in ("lt", "gt") else 1.0


def _computed(call: Call, i: int, numbers: dict[int, float | None]) -> float | None:
    """The op itself, on what stands behind the ends."""
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    leaves = torch.utils._pytree.tree_leaves(dict(call.arguments))
    if torch.Tag.nondeterministic_seeded in call.func.tags or any(isinstance(leaf, symbolic) for leaf in leaves):
        return None

    def stand_in(leaf: Any) -> Any:
        return torch.tensor(numbers[id(leaf)], dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf

    given = torch.utils._pytree.tree_map(stand_in, dict(call.arguments))
    schema = call.func._schema.arguments
    ignored = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
    named = {one.name: given[one.name] for one in schema if one.kwarg_only and one.name not in ignored}
    found = call.func(*(given[one.name] for one in schema if not one.kwarg_only), **named)
    out = found[i] if isinstance(found, tuple | list) else found
    return None if out.is_complex() else float(out)


def _absorbed(
    name: str, given: Any, at: dict[int, Steps | None], numbers: dict[int, float | None]
) -> float | None:
    """Where one operand says what comes out, whatever the others are."""
    others = [one for key, one in at.items() if numbers[key] is None]
    safe = all(one is None or one.safe for one in others)
    own = [number for number in numbers.values() if number is not None]
    if name in ("mul", "logical_and", "bitwise_and") and safe and 0 in own:
        return 0.0
    if name == "div" and given.get("rounding_mode") is None and numbers[id(given["self"])] == 0:
        return 0.0 if at[id(given["other"])] is None else None
    if name == "add" and safe and given.get("alpha", 1) == 1 and any(math.isinf(number) for number in own):
        return next(number for number in own if math.isinf(number))
    return None


@steps_of("zeros_like ones_like full_like empty_like rand_like randn_like")
def _like(step: Step) -> list[Padded]:
    source, number = step.of(step.source()), _filling(step)
    return [{dim: filled(one, number) for dim, one in source.items()}]


def _filling(step: Step) -> float | None:
    """The number that a tensor is made of."""
    if "zeros" in step.name or "ones" in step.name:
        return 0.0 if "zeros" in step.name else 1.0
    value = step.call.arguments.get("fill_value")
    return float(value) if isinstance(value, int | float) else None



@steps_of("zeros ones full new_zeros new_ones new_full empty new_empty rand randn")
def _made(step: Step) -> list[Padded]:
    out = step.call.outputs[0]
    return [{dim: filled(step.new(out.shape[dim]), _filling(step)) for dim in step.dims(out)}]


@steps_of("arange")
def _arange(step: Step) -> list[Padded]:
    """``0, 1, 2, ..``"""
    given = step.call.arguments
    if given.get("start") not in (None, 0) or given.get("step") not in (None, 1):
        raise Seen
    (size,) = step.call.outputs[0].shape
    return [{0: step.new(size, finite=True, places=step.call.outputs[0].dtype in WIDE)}]

