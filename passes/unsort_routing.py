"""Tokens sorted by their expert, worked on in that order, and put back: leave them in the samples' own order."""

from __future__ import annotations

import torch
from torch import fx

from fxgrad.graph.context import Context
from fxgrad.graph.edit import bind_again, make
from fxgrad.graph.routing import GROUPED, LOOKUPS, Order, Routing, grouped_operands, sorts
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE


def unsort_routing(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every call has ``call``. After: no rows stand in an order that the data decides, where that was all.

    ``ids, perm = sort(ids); y = grouped_mm(x[perm], w, cumsum(histc(ids))); y[inverse(perm)]`` ->
    ``fxgrad::grouped_rows(x, w, ids)``

    What is done to sorted rows one by one may as well be done to them unsorted. So every value that the order
    reaches has to be known (`Order`): rows in that order, the order itself or its inverse, or the sizes of the groups.
    One that is none of these leaves the graph as it is, for infer_samples to refuse. Rows go back through the
    inverse (``y[inverse]``), or are written to where their order says (``out.index_add_(0, perm // k, y)``).
    """
    for node in list(gm.graph.nodes):
        if sorts(node, ctx):
            routing = Routing(node)
            if routing.understood():
                _rewrite(gm.graph, routing, ctx)
    return gm


def _rewrite(graph: fx.Graph, routing: Routing, ctx: Context) -> None:
    sort, ids, kinds = routing.node, routing.ids, routing.kinds
    with graph.inserting_before(sort):
        count = make(graph, ctx, torch.ops.aten.sym_size.int, (ids, 0), beside=sort)
        order = make(graph, ctx, torch.arange, (count,), {"device": FAKE.of(ids).device}, beside=sort)

    def reads(user: fx.Node) -> bool:
        """Return whether a value of the order is an operand there, and not what is being made of it."""
        return kinds.get(user) not in (Order.ORDER, Order.INVERSE)

    for node, kind in list(kinds.items()):
        op = CALL.of(node).op
        if op in GROUPED:
            rows, weight, _ = grouped_operands(CALL.of(node))
            with graph.inserting_before(node):
                grouped = torch.ops.fxgrad.grouped_rows.default
                new = make(graph, ctx, grouped, (rows, weight, ids), beside=node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            del kinds[node]
        elif kind in (Order.ORDER, Order.INVERSE):
            node.replace_all_uses_with(order, delete_user_cb=reads)
        elif kind is Order.IDS and op in LOOKUPS:
            node.replace_all_uses_with(ids)
    for node in reversed(list(dict.fromkeys([sort, *kinds]))):
        if not node.users and kinds.get(node) is not Order.ROWS:  # rows may be written to through a view
            graph.erase_node(node)
    bind_again(graph.nodes)
