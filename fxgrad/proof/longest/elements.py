"""Padded dimensions of elementwise ops, and of tensors filled with one number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxgrad.host.pytree import tree_leaves, tree_map
from fxgrad.proof.calls import Call
from fxgrad.proof.longest.steps import WIDE, Padded, Seen, Step, Steps, filled, is_one, single, steps_of
from fxgrad.proof.trials import Symbolic

# ops with finite results for finite operands
_TOTAL = frozenset(
    """add sub rsub mul neg abs sign tanh sigmoid relu gelu silu mish elu celu leaky_relu hardtanh hardswish hardsigmoid
    log_sigmoid_forward sin cos erf atan clamp clamp_min clamp_max where masked_fill maximum minimum _to_copy clone
    detach alias copy native_dropout square""".split()
)
At = dict[int, Steps | None]  # each operand's steps along one dimension
Numbers = dict[int, Any]  # the padding of each operand
_SAME = frozenset("_to_copy clone detach alias".split())


def elementwise(step: Step) -> list[Padded]:
    """Follow an op that treats each element separately."""
    outputs = enumerate(step.call.outputs)
    return [{dim: _value(step, i, dim - out.dim()) for dim in step.dims(out)} for i, out in outputs]


def _at(step: Step, tensor: Tensor, back: int) -> Steps | None:
    """Return an operand's steps along a dimension counted from the last; None if it is broadcast along it."""
    dim = tensor.dim() + back
    if dim < 0 or is_one(tensor.shape[dim]):
        return None
    return step.of(tensor)[dim]


def _value(step: Step, i: int, back: int) -> Steps:
    """Return the steps of an output along a dimension counted from the last."""
    at = {id(tensor): _at(step, tensor, back) for _, tensor in step.call.tensors}
    known = [one for one in at.values() if one is not None]
    first = known[0]
    if not all(map(first.alike, known)):
        raise Seen
    out = step.call.outputs[i]
    number, sure = _number(step, i, at)
    leaves = tree_leaves(step.call.arguments)
    numbers = all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, float))
    total = step.name in _TOTAL and numbers and all(one is None or one.safe for one in at.values())
    whole = not out.dtype.is_floating_point and not out.dtype.is_complex
    finite = total or whole or (number is not None and math.isfinite(number))
    places = step.name in _SAME and first.places and out.dtype in WIDE
    return Steps(first.length, first.inner, number, sure, finite, places)


def _number(step: Step, i: int, at: At) -> tuple[float | None, bool]:
    """Return the padding of an output, and whether it is `Steps.sure`."""
    call, name = step.call, step.name
    arguments = call.arguments
    numbers = {id(tensor): operand(call, tensor, at[id(tensor)]) for _, tensor in call.tensors}
    sure = all(one is None or one.sure for one in at.values())
    if name in ("lt", "ge", "gt", "le"):
        inside = _inside(step, at)
        if inside is not None:
            return inside, True
    if name in ("where", "masked_fill", "copy"):
        chosen = _chosen(name, arguments, numbers, at)
        if not isinstance(chosen, Tensor):
            return (None if chosen is None else float(chosen)), True
        steps = at[id(chosen)]
        return numbers[id(chosen)], steps is None or steps.sure
    if name == "native_dropout":
        return (0.0 if i == 0 and numbers[id(arguments["input"])] == 0 else None), sure
    if None not in numbers.values():
        return (_computed(call, i, numbers) if sure or _shows_nan(step, i) else None), sure
    return _absorbed(step, at, numbers)


def _chosen(name: str, arguments: Any, numbers: Numbers, at: At) -> Any:
    """Return the operand that the op copies into the padding; None if that is unknown."""
    if name == "copy":
        return arguments["src"]
    which = arguments["condition" if name == "where" else "mask"]
    decides, steps = numbers[id(which)], at[id(which)]
    if decides is None or not (steps is None or steps.sure):
        return None
    if name == "where":
        return arguments["self"] if decides else arguments["other"]
    return arguments["value"] if decides else arguments["self"]


def _shows_nan(step: Step, i: int) -> bool:
    """Decide whether an op propagates nan."""
    return step.name in _TOTAL - {"sign"} and step.call.outputs[i].dtype.is_floating_point


def operand(call: Call, tensor: Tensor, steps: Steps | None) -> float | None:
    """Return the padding of an operand, or its one value if it has no steps."""
    if steps is not None:
        return steps.number
    known = call.facts.of(tensor).known
    if known is None or not single(tensor) or known.varies(call.trial) or known.has_unknown(call.trial):
        return None
    return float(known.value(call.trial))


def _inside(step: Step, at: At) -> float | None:
    """Return the padding of ``arange(longest) < lengths``, a mask that is true up to the end of each sample."""
    places, ends = (step.call.arguments[name] for name in ("self", "other"))
    if step.name not in ("lt", "ge"):
        places, ends = ends, places
    if not isinstance(places, Tensor) or not isinstance(ends, Tensor):
        return None
    steps, pack = at[id(places)], step.call.facts.of(ends).ends
    if steps is None or not steps.places or at[id(ends)] is not None or pack is None:
        return None
    if steps.inner != 1 or step.lengths.pack(steps.length) != pack:
        return None
    return 0.0 if step.name in ("lt", "gt") else 1.0


def _computed(call: Call, i: int, numbers: Numbers) -> float | None:
    """Run the op on the padding; return None if the result or its derivative is not determined by the padding."""
    leaves = tree_leaves(call.arguments)
    if torch.Tag.nondeterministic_seeded in call.func.tags or any(isinstance(leaf, Symbolic) for leaf in leaves):
        return None
    results = [_run(call, i, {key: number or zero for key, number in numbers.items()}) for zero in (0.0, -0.0)]
    return results[0] if results[0] == results[1] else None


def _run(call: Call, i: int, numbers: dict[int, float]) -> float | None:
    leaves: list[Tensor] = []

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        value = torch.full([1] * min(leaf.dim(), 1), numbers[id(leaf)], dtype=leaf.dtype)
        leaves.append(value.requires_grad_(leaf.dtype.is_floating_point))
        return value

    with torch.enable_grad():
        result = call.run(tree_map(stand_in, dict(call.arguments)))
        out = result[i] if isinstance(result, tuple | list) else result
        if out.is_complex():
            return None
        if out.requires_grad:
            out.sum().backward()
    slopes = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return float(out) if all(bool(slope.isfinite().all()) for slope in slopes) else None


def _absorbed(step: Step, at: At, numbers: Numbers) -> tuple[float | None, bool]:
    """Return the padding if one operand determines it, such as 0 in a product with finite values."""
    arguments, name = step.call.arguments, step.name
    others = [one for key, one in at.items() if numbers[key] is None]
    safe = all(one is None or one.safe for one in others)
    known_numbers = [number for number in numbers.values() if number is not None]
    if name in ("logical_and", "bitwise_and") and 0 in known_numbers and _truths(step):
        return 0.0, True
    if name in ("logical_or", "bitwise_or") and 1 in known_numbers and _truths(step):
        return 1.0, True
    if name == "mul" and safe and 0 in known_numbers:
        return 0.0, False
    if name == "div" and arguments.get("rounding_mode") is None and numbers[id(arguments["self"])] == 0:
        return (0.0 if at[id(arguments["other"])] is None else None), False
    if name == "add" and safe and arguments.get("alpha", 1) == 1 and any(map(math.isinf, known_numbers)):
        return next(number for number in known_numbers if math.isinf(number)), False
    return None, True


def _truths(step: Step) -> bool:
    """Decide whether all operands are bool tensors."""
    operands = [tensor for _, tensor in step.call.tensors]
    return all(tensor.dtype is torch.bool for tensor in operands)


@steps_of("zeros_like ones_like full_like empty_like rand_like randn_like")
def _like(step: Step) -> list[Padded]:
    source, number = step.of(step.source()), _filling(step)
    return [{dim: filled(one, number) for dim, one in source.items()}]


def _filling(step: Step) -> float | None:
    """Return the number that fills a tensor."""
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
    """Follow ``arange(longest)``: 0, 1, 2, .."""
    arguments = step.call.arguments
    if arguments.get("start") not in (None, 0) or arguments.get("step") not in (None, 1):
        raise Seen
    (size,) = step.call.outputs[0].shape
    return [{0: step.new(size, finite=True, places=step.call.outputs[0].dtype in WIDE)}]
