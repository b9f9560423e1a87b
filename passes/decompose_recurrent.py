"""Write recurrent layers as one recurrence for each layer and direction."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxgrad.graph.context import Context, place_beside
from fxgrad.ops.calls import op_name
from fxgrad.samples.recurrent_states import MODES


def decompose_recurrent(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no op runs over time but ``recurrence``.

    ``recurrent_layers(x, ..)`` -> ``hs = recurrence(x, h0, w_ih, b_ih, w_hh, b_hh)[0]; out = hs[1:]``, for each
    layer and direction. The definition is that of PyTorch's decomposition table for ``aten.lstm.input`` and its
    kin, with one loop over time in place of a copy of the step for each.
    """
    for node in list(gm.graph.nodes):
        arguments = _arguments(node)
        if arguments is not None:
            _Layers(gm.graph, node).write(**arguments)
    return gm


def _arguments(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a node that runs recurrent layers, by name; None for any other node."""
    if op_name(node.target) == "fxgrad::recurrent_layers":
        names = "input batch_sizes order rows hx weights mode has_biases num_layers dropout training bidirectional"
        return dict(zip(names.split(), node.args, strict=True))
    mode = MODES.get(op_name(node.target)) if node.op == "call_function" else None
    if mode is None or len(node.args) != 9 or node.kwargs:
        return None
    input, hx, weights, has_biases, num_layers, dropout, training, bidirectional, batch_first = node.args
    return dict(
        input=input,
        batch_sizes=None,
        order=None,
        rows=0,
        hx=hx if mode == "LSTM" else [hx],
        weights=weights,
        mode=mode,
        has_biases=has_biases,
        num_layers=num_layers,
        dropout=dropout,
        training=training,
        bidirectional=bidirectional,
        batch_first=batch_first,
    )


class _Layers:
    """Writes the layers of one node in front of it."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        self.made: list[fx.Node] = []

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(function, args)
        place_beside(self.node, made)
        self.made.append(made)
        return made

    def write(
        self,
        input: fx.Node,
        batch_sizes: fx.Node | None,
        order: fx.Node | None,
        rows: Any,
        hx: Sequence[fx.Node],
        weights: Sequence[fx.Node],
        mode: str,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> None:
        out = self.call(torch.transpose, input, 0, 1) if batch_first else input
        packed = None if batch_sizes is None or order is None else (batch_sizes, order)
        lengths = None if packed is None else self.call(torch.ops.fxgrad.packed_lengths.default, input, *packed)
        given = iter(weights)
        last_h: list[fx.Node] = []
        last_c: list[fx.Node] = []
        per_direction = len(weights) // (num_layers * (2 if bidirectional else 1))
        for layer in range(num_layers):
            if layer and dropout and training:
                out = self._dropped(out, dropout, packed, rows)
            outputs = []
            for reverse in (False, True)[: 2 if bidirectional else 1]:
                states = [self.call(operator.getitem, h, len(last_h)) for h in hx]
                own = [next(given) for _ in range(per_direction)]
                output, h, c = self._direction(mode, out, lengths, states, own, has_biases, reverse)
                outputs.append(output)
                last_h.append(h)
                last_c.append(c)
            out = self.call(torch.cat, outputs, -1) if bidirectional else outputs[0]
        results = [self.call(torch.transpose, out, 0, 1) if batch_first else out, self.call(torch.stack, last_h)]
        results.append(self.call(torch.stack, last_c) if mode == "LSTM" else results[1])
        self._replace(results)

    def _direction(
        self,
        mode: str,
        input: fx.Node,
        lengths: fx.Node | None,
        states: Sequence[fx.Node],
        weights: Sequence[fx.Node],
        has_biases: bool,
        reverse: bool,
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """One layer in one direction: its outputs at all steps, its last state, its last cell state."""
        w_ih, w_hh, *rest = weights
        b_ih, b_hh = rest[:2] if has_biases else (None, None)
        w_hr = rest[-1] if len(rest) > (2 if has_biases else 0) else None
        c0 = states[1] if mode == "LSTM" else None
        result = self.call(
            torch.ops.fxgrad.recurrence.default,
            mode,
            input,
            lengths,
            states[0],
            c0,
            w_ih,
            b_ih,
            w_hh,
            b_hh,
            w_hr,
            reverse,
        )
        hs = self.call(operator.getitem, result, 0)
        output = self.call(operator.getitem, hs, slice(None, -1) if reverse else slice(1, None))
        last = self.call(operator.getitem, hs, 0 if reverse else -1)
        return output, last, self.call(operator.getitem, result, 1)

    def _dropped(self, out: fx.Node, p: float, packed: tuple[fx.Node, fx.Node] | None, rows: Any) -> fx.Node:
        """Of packed data PyTorch draws random numbers for the rows there are, and none for padding."""
        if packed is None:
            return self.call(F.dropout, out, p, True)
        dropped = self.call(F.dropout, self.call(torch.ops.fxgrad.repack.default, out, *packed, rows), p, True)
        length = self.call(torch.ops.aten.sym_size.int, out, 0)
        return self.call(torch.ops.fxgrad.pad_packed.default, dropped, *packed, length, 0.0)

    def _replace(self, results: Sequence[fx.Node]) -> None:
        for user in list(self.node.users):
            assert user.target is operator.getitem and isinstance(user.args[1], int)
            user.replace_all_uses_with(results[user.args[1]])
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)
        for made in reversed(self.made):
            if not made.users:
                self.graph.erase_node(made)
