"""Integers in a graph: their known bounds, and the arguments in which an op reads numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxgrad.host.pytree import tree_leaves
from fxgrad.proof.calls import Call, Origins
from fxgrad.proof.longest.places import whole
from fxgrad.proof.longest.steps import WIDE, Padding

_SIZES = {
    **dict.fromkeys("view _unsafe_view expand zeros ones full empty rand randn".split(), "size"),
    **dict.fromkeys("new_zeros new_ones new_full new_empty".split(), "size"),
    "reshape": "shape",
}
_CASTS = frozenset("detach clone alias _to_copy".split())
_SAME_NUMBERS = _CASTS | frozenset("expand view unsqueeze squeeze transpose".split())


def numbers_read(call: Call, padding: Padding) -> list[Any]:
    """Return the leaves of the arguments that an op uses for more than the sizes of its output."""
    unread = {_SIZES.get(call.name)} if padding and call.is_op else set()
    if call.name == "arange" and padding.lone(call.arguments["end"]):
        unread.add("end")
    return tree_leaves({name: arg for name, arg in call.arguments.items() if name not in unread})


def numbers_of(call: Call, out: Tensor, origins: Origins) -> Origins:
    """Add the known bounds of the integers in a result to its origins."""
    source = call.arguments.get("self")
    if not isinstance(source, Tensor) or source.dtype not in WIDE or out.dtype not in WIDE:
        return origins
    whole_slice = call.name == "slice" and whole(call.arguments, source.shape[call.arguments["dim"]])
    if call.name not in _SAME_NUMBERS and not whole_slice:
        return replace(origins, least=_least(call, call.facts.of(source).least))
    if source.dtype.is_floating_point and source.dtype != out.dtype:
        return origins  # the cast may round
    exact = source.dtype == out.dtype or (source.dtype is torch.int32 and out.dtype is torch.int64)
    cast = source if call.name in _CASTS and exact else None
    return replace(origins, least=call.facts.of(source).least, ends=call.facts.of(source).ends, cast_of=cast)


def _least(call: Call, bound: int | None) -> int | None:
    """Return a known lower bound of an integer result from that of the first operand."""
    other, low = call.arguments.get("other"), call.arguments.get("min")
    if call.name in ("clamp", "clamp_min") and type(low) is int and call.arguments.get("max") is None:
        return low if bound is None else max(low, bound)
    if bound is None or type(other) is not int or call.arguments.get("alpha", 1) != 1:
        return None
    return {"add": bound + other, "sub": bound - other}.get(call.name)
