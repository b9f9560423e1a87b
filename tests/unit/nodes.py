"""Graphs of one call, for what reads a node and its operands."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls a function, or a method that is named, with tensors in the places of nodes: x, y, z."""
    graph = fx.Graph()
    names = iter("xyz")

    def operand(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder(next(names))
            node.meta["fake"] = value
            return node
        if isinstance(value, tuple | list):
            return type(value)(map(operand, value))
        return value

    arguments = operand(args), {name: operand(value) for name, value in kwargs.items()}
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, *arguments)
