"""What a value of a graph is made of: its tensors, the memory they lie in, and other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from torch import Tensor, fx

from fxgrad.host.functorch import is_wrapped
from fxgrad.host.pytree import tree_leaves
from fxgrad.host.tensors import identity
from fxgrad.ops.facts import EXAMPLE, value_of


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of an op's output, one or several."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [item for item in value if isinstance(item, Tensor)]
    return []


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """Return what a get_attr node of a graph reads."""
    return attrgetter(str(node.target))(gm)


def memory_of(fake: Any) -> int | None:
    """What tells a value's memory from other memory; None for a value that has none, as inside of ``torch.vmap``."""
    if not isinstance(fake, Tensor) or is_wrapped(fake):
        return None
    address: int = identity(fake.untyped_storage())
    return address


def memory(node: Any) -> int | None:
    """Return the memory of a node's value, or of the first of several; None for what is no node."""
    return next(map(memory_of, tensors_of(value_of(node))), None) if isinstance(node, fx.Node) else None


def memories(*nodes: fx.Node) -> set[int | None]:
    """Return the memory of all tensors in the values of nodes."""
    values = [value for node in nodes for value in tree_leaves(value_of(node))]
    return {memory_of(value) for value in values if isinstance(value, Tensor)}


def names_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that are one tensor in Dynamo's trace, in order: ``h``, ``h.contiguous()``, ``h.mul_(2)``."""
    value = EXAMPLE.get(node)
    if not isinstance(value, Tensor):
        return [node]
    examples = {other: EXAMPLE.get(other) for other in node.graph.nodes}
    return [one for one, it in examples.items() if isinstance(it, Tensor) and identity(it) == identity(value)]


def upstream(
    *nodes: fx.Node, through: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes
) -> Iterator[fx.Node]:
    """Yield nodes and the nodes that they are made from, each once."""
    stack, seen = list(nodes), set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(through(node))
