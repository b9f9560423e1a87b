"""Which nodes of a graph are one tensor or share memory, and which write there: by the values of Dynamo's trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from fxgrad.host.tensors import identity
from fxgrad.ops.calls import bind
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.user_functions import UserFunction
from fxgrad.ops.values import memory_of, tensors_of
from fxgrad.ops.written import written_to


def memory(node: Any) -> int | None:
    """Return what tells a node's memory in Dynamo's trace from other memory."""
    return next(map(memory_of, tensors_of(EXAMPLE.get(node))), None) if isinstance(node, fx.Node) else None


def names_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that are the same tensor as a node, in their order: ``h``, ``h.contiguous()``, ``h.mul_(2)``."""
    value = EXAMPLE.get(node)
    if not isinstance(value, Tensor):
        return [node]
    examples = ((other, EXAMPLE.get(other)) for other in node.graph.nodes)
    return [other for other, example in examples if isinstance(example, Tensor) and _one(example, value)]


def _one(example: Tensor, other: Tensor) -> bool:
    return identity(example) == identity(other)


def written(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a node of Dynamo's graph writes into."""
    return [*written_to(node, bind(node)), *dirty(node)] if node.op in ("call_function", "call_method") else []


def dirty(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a user's autograd.Function writes into: ``ctx.mark_dirty``."""
    arguments = [node.args[i] for i in node.target.dirty] if isinstance(node.target, UserFunction) else []
    return [arg for arg in arguments if isinstance(arg, fx.Node)]


def writes_of(graph: fx.Graph) -> Mapping[int | None, list[fx.Node]]:
    """Return the calls of Dynamo's graph that write into each memory, in their order."""
    writes: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for place in set(map(memory, written(node))) - {None}:
            writes[place].append(node)
    return writes
