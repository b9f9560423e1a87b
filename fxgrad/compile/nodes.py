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
    node.meta["val"] = value_of(node.target, node.args, node.kwargs)
    return node


def value_of(op: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator makes of the traced values of nodes among its arguments."""
    args, kwargs = fx.map_arg((args, kwargs), lambda one: one.meta["val"])
    return op(*args, **kwargs)
