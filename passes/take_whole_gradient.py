"""A batch of one: the ordinary gradient is the sample's, so no samples have to be found."""

from __future__ import annotations

from functools import partial
from operator import is_not

from torch import fx

from fxgrad.context import Context
from fxgrad.targets import SingleTarget


def take_whole_gradient(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it, at batch size 1. After: each parameter stands behind ``single``.

    ``f(w)`` -> ``f(single(ghost_w, w))``, whose backward hands w's gradient to the ghost ``[1, *w.shape]``.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    trainable = [node for node in placeholders if node.name in ctx.by_node]
    cursor, ghosts = placeholders[-1], []
    for node in trainable:
        with graph.inserting_after(cursor):
            cursor = graph.placeholder(f"ghost_{node.name}")
        ghosts.append(cursor)
    scale = 1.0 if ctx.loss_scale == "mean" else float(ctx.loss_scale)
    for node, ghost in zip(trainable, ghosts, strict=True):
        with graph.inserting_after(cursor):
            cursor = graph.call_function(SingleTarget(scale), (ghost, node))
        node.replace_all_uses_with(cursor, delete_user_cb=partial(is_not, cursor))
    return gm
