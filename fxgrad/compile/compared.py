"""What a backward compares is saved, not computed again.

The gradient of ``amax`` goes to the elements that equal the result, that of ``minimum`` to the smaller one.
Inductor's partitioner computes a cheap operand again in the backward. In another kernel, or at the end of a row,
``tanh`` may differ in its last bit: no element is equal then, and the gradient is NaN, or it goes to other elements.
PyTorch's own compiled models have that fault.

    y = tanh(h)                  tagged: the partitioner saves it
    top = amax(y)
    mask = eq(view(top), y)      tagged: it belongs into the backward, or the forward computes y twice for it
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TypeGuard

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fxgrad.compile.nodes import is_view
from fxgrad.ops.calls import op_name
from fxgrad.ops.tags import is_pointwise

aten = torch.ops.aten

_SELECTS = frozenset("amax amin max min aminmax median nanmedian topk sort kthvalue mode".split())
_COMPARES = frozenset("eq ne lt le gt ge".split())


def save_compared(graph: fx.Graph) -> None:
    """Tag the operands of such comparisons in a traced graph of a forward with its backward."""
    output = graph.output_node()
    of_backward = _reached({node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name}) - {output}
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node.target) not in _COMPARES:
            continue
        compared = [arg for arg in node.args if isinstance(arg, fx.Node) and _is_floating(arg)]
        selections = [one for arg in compared for one in _selections(arg)]
        # With a number: an operand that is made of a selection may be as large as the number is.
        if (len(compared) < 2 and not selections) or output in _reached({node}, past=of_backward):
            continue  # the model's own mask
        sources = [source for one in selections for source in _sources(one)]
        for operand in filter(_is_computed, {*map(_unviewed, compared), *sources}):
            operand.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta["partitioner_tag"] = "must_be_in_backward"  # PyTorch's name


def _selections(value: fx.Node) -> list[fx.Node]:
    """Return the selections that a value is made of, element by element."""
    found, waiting, selections = {value}, [value], []
    while waiting:
        node = waiting.pop()
        if op_name(node.target) in _SELECTS:
            selections.append(node)
        elif node.op == "call_function" and (is_pointwise(node) or _is_view(node)):
            waiting += [one for one in node.all_input_nodes if one not in found]
            found |= {*node.all_input_nodes}
    return selections


def _sources(selection: fx.Node) -> list[object]:
    """Return what is selected from, and what that is made of by an op such as ``abs``."""
    source = _unviewed(selection.args[0])
    if isinstance(source, fx.Node) and is_pointwise(source):
        return [source, *map(_unviewed, source.all_input_nodes)]
    return [source]


def _is_computed(value: object) -> TypeGuard[fx.Node]:
    return isinstance(value, fx.Node) and value.op == "call_function"


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _reached(nodes: set[fx.Node], past: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the nodes and all that is computed of them; what ``past`` holds ends the search."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        users = {user for user in waiting.pop().users if user not in found and user not in past}
        found |= users
        waiting += users
    return found


def _unviewed(value: object) -> object:
    """Return what a value is a view or a copy of."""
    while isinstance(value, fx.Node) and value.op == "call_function" and _is_view(value):
        value = value.args[0]
    return value


def _is_view(node: fx.Node) -> bool:
    """Return whether a node is a view, a copy, or what is selected."""
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and (op_name(parent.target) in _SELECTS or is_view(parent))
    return node.target is aten.clone.default or is_view(node)
