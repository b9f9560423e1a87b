"""Which inputs of a captured graph are states of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from fxgrad.calls import op_name
from fxgrad.samples.families import Family, family_of

MODES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN_TANH", "rnn_relu": "RNN_RELU"}
_KEEPING = frozenset("contiguous detach linear layer_norm clone".split())


def states_given(node: fx.Node) -> Sequence[Any]:
    """The states ``[layers * directions, B, out]`` that a node's recurrent layers start from."""
    name = op_name(node.target)
    if name == "fxgrad::recurrent_layers":
        return list(node.args[4])  # type: ignore[arg-type]
    if name in MODES and node.op == "call_function" and len(node.args) == 9 and not node.kwargs:
        return list(node.args[1]) if name == "lstm" else [node.args[1]]  # type: ignore[arg-type]
    return ()


def inputs_as_states(gm: fx.GraphModule) -> set[fx.Node]:
    """The placeholders of a graph, as Dynamo left it, that recurrent layers start from.

    A state may have been changed on its way in each of its elements, or along its last dimension; a transposed one
    held its samples elsewhere.
    """
    found: set[fx.Node] = set()
    stack = [state for node in gm.graph.nodes for state in states_given(node)]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            found.add(node)
        else:
            stack.extend(_sources(node))
    return found


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """The operands whose first two dimensions are a node's."""
    name, rows = op_name(node.target), _rows(node)
    if name in _KEEPING or family_of(name.removesuffix("_")) is Family.ELEMENTWISE:
        for source in node.all_input_nodes:
            if rows is not None and _rows(source) == rows:
                yield source


def _rows(node: fx.Node) -> tuple[str, ...] | None:
    value = node.meta.get("example_value")
    return tuple(map(str, value.shape[:2])) if isinstance(value, Tensor) and value.dim() == 3 else None
