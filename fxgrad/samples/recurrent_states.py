"""The inputs of a captured graph that are states of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.families import Family, family_of
from fxgrad.ops.values import upstream

MODES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN_TANH", "rnn_relu": "RNN_RELU"}
_KEEPING = frozenset("contiguous detach linear layer_norm clone".split())


def _states(node: fx.Node) -> Sequence[Any]:
    """Return the initial states ``[layers * directions, B, out]`` of a node's recurrent layers."""
    name = op_name(node.target)
    if name == "fxgrad::recurrent_layers":
        return list(node.args[4])  # type: ignore[arg-type]
    if name in MODES and node.op == "call_function" and len(node.args) == 9 and not node.kwargs:
        return list(node.args[1]) if name == "lstm" else [node.args[1]]  # type: ignore[arg-type]
    return ()


def inputs_as_states(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the placeholders of Dynamo's graph that are initial states of recurrent layers.

    Elementwise ops and ops along the last dimension may lie between the input and the layer. A transposed input has its
    samples on another dimension, so it is not returned.
    """
    states = [state for node in gm.graph.nodes for state in _states(node) if isinstance(state, fx.Node)]
    return {node for node in upstream(*states, through=_sources) if node.op == "placeholder"}


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands with the same first two dimensions as the node."""
    name, rows = op_name(node.target), _rows(node)
    if name in _KEEPING or family_of(name.removesuffix("_")) is Family.ELEMENTWISE:
        for source in node.all_input_nodes:
            if rows is not None and _rows(source) == rows:
                yield source


def _rows(node: fx.Node) -> tuple[str, ...] | None:
    value = EXAMPLE.get(node)
    return tuple(map(str, value.shape[:2])) if isinstance(value, Tensor) and value.dim() == 3 else None
