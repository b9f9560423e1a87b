"""Which nodes of a graph are one tensor: by the values of Dynamo's trace."""

from __future__ import annotations

from torch import Tensor, fx

from fxgrad.host.tensors import identity
from fxgrad.ops.facts import EXAMPLE


def names_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that are the same tensor as a node, in their order: ``h``, ``h.contiguous()``, ``h.mul_(2)``."""
    value = EXAMPLE.get(node)
    if not isinstance(value, Tensor):
        return [node]
    examples = ((other, EXAMPLE.get(other)) for other in node.graph.nodes)
    return [other for other, example in examples if isinstance(example, Tensor) and _one(example, value)]


def _one(example: Tensor, other: Tensor) -> bool:
    return identity(example) == identity(other)
