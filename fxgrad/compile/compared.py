"""What a backward compares for equality is saved, not computed again.

The gradient of ``amax`` goes to the elements that equal the result. Inductor's partitioner computes a cheap operand
again in the backward. In another kernel, or at the end of a row, ``tanh`` may differ in its last bit: no element is
equal then, and the gradient is NaN, or it goes to other elements. PyTorch's own compiled models have that fault.

    y = tanh(h)                  tagged: the partitioner saves it
    top = amax(y)
    mask = eq(view(top), y)      tagged: it belongs into the backward, or the forward computes y twice for it
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxgrad.host.ops import overload_of, schemas

aten = torch.ops.aten

_SELECTS = frozenset(
    overload
    for packet in (aten.amax, aten.amin, aten.max, aten.min, aten.aminmax, aten.median, aten.nanmedian)
    for overload in (getattr(packet, name) for name in packet.overloads())
)


def save_compared(graph: fx.Graph) -> None:
    """Tag the operands of such comparisons in a traced graph of a forward with its backward."""
    output = graph.output_node()
    of_backward = _reached({node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name}) - {output}
    for equal in graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        if output in _reached({equal}, past=of_backward):
            continue  # the model's own mask
        compared = [_unviewed(arg) for arg in equal.args]
        selects = [node for node in compared if isinstance(node, fx.Node) and node.target in _SELECTS]
        for node in selects:
            for operand in {*map(_unviewed, node.args[:1]), *compared} - {*selects}:
                if isinstance(operand, fx.Node) and operand.op == "call_function":
                    operand.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                    equal.meta["partitioner_tag"] = "must_be_in_backward"  # PyTorch's name


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
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and (parent.target in _SELECTS or _is_view(parent))
    if node.target in (aten.clone.default, aten.detach.default):
        return True
    returns = [one for schema in schemas(overload_of(node.target)) for one in schema.returns]
    return any(one.alias_info is not None for one in returns)
