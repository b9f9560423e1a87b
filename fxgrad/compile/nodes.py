"""New nodes of traced graphs, with the values that were traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def call(graph: fx.Graph, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of an operator; its value is what the operator makes of the traced ones."""
    return with_value(graph.call_function(op, args, kwargs))


def with_value(node: fx.Node) -> fx.Node:
    """Trace a node anew, from the values of its operands."""
    op: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    node.meta["val"] = op(*args, **kwargs)
    return node
