"""Write recurrent layers as one recurrence for each layer and direction."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxgrad.errors import LostLayout
from fxgrad.graph.context import Context, place_beside, source_line
from fxgrad.graph.edit import replace_outputs
from fxgrad.ops.calls import op_name
from fxgrad.samples.recurrent_states import MODES


def decompose_recurrent(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no op runs over time but ``recurrence``.

    ``recurrent_layers(x, ..)`` -> ``hs = recurrence(x, h0, w_ih, b_ih, w_hh, b_hh)[0]; out = hs[1:]``, for each
    layer and direction. The definition is that of PyTorch's decomposition table for ``aten.lstm.input`` and its
    kin, with one loop over time in place of a copy of the step for each. ``sorted_order(data, batch_sizes)`` is
    the order of the samples in the ``pack`` that gave the batch_sizes.
    """
    for node in list(gm.graph.nodes):
        if op_name(node.target) == "fxgrad::sorted_order":
            _put_order(gm.graph, node)
        layers = _layers(node)
        if layers is not None:
            _Writer(gm.graph, node, layers).write()
    return gm


def _put_order(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the order of a PackedSequence that has no indices; only sorted samples may have none."""
    sizes: Any = node.args[1]
    pack = sizes.args[0] if sizes.target is operator.getitem else None
    if pack is None or op_name(pack.target) != "fxgrad::pack" or pack.args[2] is not True:
        raise LostLayout(
            "a PackedSequence without sorted_indices has its samples in the order of their lengths, and that is not "
            "seen to be the order of the batch",
            where=source_line(node),
            advice="Pass on all fields, as in PackedSequence(f(p.data), *p[1:]), or pack sorted samples in the model "
            "with enforce_sorted=True.",
        )
    with graph.inserting_before(node):
        order = graph.call_function(operator.getitem, (pack, 2))
    place_beside(node, order)
    node.replace_all_uses_with(order)
    graph.erase_node(node)


@dataclass
class _Layers:
    """The arguments of `fxgrad::recurrent_layers`, in its order, and one that PyTorch's own ops have besides."""

    input: fx.Node
    batch_sizes: fx.Node | None
    order: fx.Node | None
    rows: Any
    hx: Sequence[fx.Node]
    weights: Sequence[fx.Node]
    mode: str
    has_biases: bool
    num_layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool = False

    @property
    def packed(self) -> tuple[fx.Node, fx.Node] | None:
        return None if self.batch_sizes is None or self.order is None else (self.batch_sizes, self.order)


def _layers(node: fx.Node) -> _Layers | None:
    """Return the recurrent layers that a node runs, if any."""
    args: Any = node.args
    if op_name(node.target) == "fxgrad::recurrent_layers":
        return _Layers(*args)
    mode = MODES.get(op_name(node.target)) if node.op == "call_function" else None
    if mode is None or len(args) != 9 or node.kwargs:
        return None
    input, hx, weights, *settings = args
    return _Layers(input, None, None, 0, hx if mode == "LSTM" else [hx], weights, mode, *settings)


class _Writer:
    """Writes the layers of one node in front of it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, layers: _Layers) -> None:
        self.graph, self.node, self.layers = graph, node, layers
        self.made: list[fx.Node] = []

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(function, args)
        place_beside(self.node, made)
        self.made.append(made)
        return made

    def write(self) -> None:
        layers = self.layers
        out = self.call(torch.transpose, layers.input, 0, 1) if layers.batch_first else layers.input
        lengths = None
        if layers.packed is not None:
            lengths = self.call(torch.ops.fxgrad.packed_lengths.default, layers.input, *layers.packed)
        weights = iter(layers.weights)
        last_h: list[fx.Node] = []
        last_c: list[fx.Node] = []
        directions = (False, True) if layers.bidirectional else (False,)
        per_direction = len(layers.weights) // (layers.num_layers * len(directions))
        for layer in range(layers.num_layers):
            if layer and layers.dropout and layers.training:
                out = self._dropped(out)
            outputs = []
            for reverse in directions:
                states = [self.call(operator.getitem, h, len(last_h)) for h in layers.hx]
                output, h, c = self._direction(out, lengths, states, list(islice(weights, per_direction)), reverse)
                outputs.append(output)
                last_h.append(h)
                last_c.append(c)
            out = self.call(torch.cat, outputs, -1) if layers.bidirectional else outputs[0]
        out = self.call(torch.transpose, out, 0, 1) if layers.batch_first else out
        results = [out, self.call(torch.stack, last_h)]
        results.append(self.call(torch.stack, last_c) if layers.mode == "LSTM" else results[1])
        replace_outputs(self.node, results)
        for made in reversed(self.made):
            if not made.users:
                self.graph.erase_node(made)

    def _direction(
        self,
        input: fx.Node,
        lengths: fx.Node | None,
        states: Sequence[fx.Node],
        weights: Sequence[fx.Node],
        reverse: bool,
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return one layer in one direction: its outputs at all steps, its last state, its last cell state."""
        mode, biases = self.layers.mode, 2 if self.layers.has_biases else 0
        w_ih, w_hh, *rest = weights
        b_ih, b_hh = rest[:2] if biases else (None, None)
        w_hr = rest[-1] if len(rest) > biases else None
        h0, c0 = states if mode == "LSTM" else (states[0], None)
        recurrence = torch.ops.fxgrad.recurrence.default
        result = self.call(recurrence, mode, input, lengths, h0, c0, w_ih, b_ih, w_hh, b_hh, w_hr, reverse)
        hs = self.call(operator.getitem, result, 0)
        output = self.call(operator.getitem, hs, slice(None, -1) if reverse else slice(1, None))
        last = self.call(operator.getitem, hs, 0 if reverse else -1)
        return output, last, self.call(operator.getitem, result, 1)

    def _dropped(self, out: fx.Node) -> fx.Node:
        """Of packed data PyTorch draws random numbers for the rows there are, and none for padding."""
        p, packed = self.layers.dropout, self.layers.packed
        if packed is None:
            return self.call(F.dropout, out, p, True)
        dropped = self.call(
            F.dropout, self.call(torch.ops.fxgrad.repack.default, out, *packed, self.layers.rows), p, True
        )
        length = self.call(torch.ops.aten.sym_size.int, out, 0)
        return self.call(torch.ops.fxgrad.pad_packed.default, dropped, *packed, length, 0.0)
