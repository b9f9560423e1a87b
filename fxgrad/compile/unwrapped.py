"""The graph that AOTAutograd calls between wrappers, where those were seen to change nothing.

The wrappers regenerate aliases, copy what was mutated, unwrap subclasses and count random numbers. What they do is
fixed when a graph is compiled, so one call shows whether they do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxgrad.host.dispatch import any_autocast
from fxgrad.host.inductor import graphs_called
from fxgrad.host.tensors import version

Graph = Callable[[list[Any]], Sequence[Any]]


def called_to_see(compiled: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Sequence[Any], Graph | None]:
    """Call a compiled graph without a gradient; return its outputs, and the graph that can be called in its place."""
    versions = _versions(inputs)
    with graphs_called() as calls:
        outputs: Sequence[Any] = compiled(*inputs)
    if len(calls) != 1 or any_autocast() or _versions(inputs) != versions:
        return outputs, None
    graph, given, returned = calls[0]
    same = len(given) == len(inputs) and len(returned) == len(outputs)
    if not same or not all(map(_is_same, (*given, *returned), (*inputs, *outputs))):
        return outputs, None
    return outputs, graph


def _versions(inputs: Sequence[Any]) -> list[int]:
    return [version(value) for value in inputs if isinstance(value, Tensor) and not value.is_inference()]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is int and type(other) is int and one == other)
