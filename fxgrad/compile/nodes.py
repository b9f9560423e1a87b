"""New nodes of traced graphs, with the values that were traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from fxgrad.host.ops import overload_of, schemas


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


def is_view(node: fx.Node) -> bool:
    """Return whether a node calls an op that returns views, or is one of several such views."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and is_view(parent)
    returns = [one for schema in schemas(overload_of(node.target)) for one in schema.returns]
    return any(one.alias_info is not None for one in returns)


def unviewed(node: fx.Node) -> fx.Node:
    """Return what a value is a view of; itself where it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
