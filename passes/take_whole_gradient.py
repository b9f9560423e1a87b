"""A batch of one: the ordinary gradient is the sample's, so no samples have to be found."""

from __future__ import annotations

from torch import fx

from fxgrad.calls import op_name
from fxgrad.context import Context, without_gradients
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
    stopped = without_gradients(graph)
    for node, ghost in zip(trainable, ghosts, strict=True):
        readers = [user for user in sorted(node.users) if user not in stopped]
        written = [user for user in sorted(node.users) if user in stopped and op_name(user.target).endswith("_")]
        with graph.inserting_after(cursor):
            cursor = single = graph.call_function(SingleTarget(scale), (ghost, node))
        for reader in readers:
            if written and written[0] < reader:  # what is written without gradients goes to the parameter itself
                written = [write for write in written if not write < reader]
                with graph.inserting_before(reader):
                    single = graph.call_function(SingleTarget(scale), (ghost, node))
            reader.replace_input_with(node, single)
    return gm
