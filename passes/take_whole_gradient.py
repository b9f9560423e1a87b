"""A batch of one: the ordinary gradient is the sample's, so no samples have to be found."""

from __future__ import annotations

from torch import fx

from fxgrad.calls import op_name
from fxgrad.context import Context, without_gradients
from fxgrad.opening import add_ghosts, open_tape
from fxgrad.targets import SingleTarget


def take_whole_gradient(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it, at batch size 1. After: each parameter stands behind ``single``.

    ``f(w)`` -> ``f(single(tape, handle, w))``, whose backward writes w's gradient on the tape as the one sample's.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    trainable = [node for node in placeholders if node.name in ctx.by_node]
    ghosts, given = add_ghosts(graph, ctx, trainable)
    tape, cursor = open_tape(graph, ctx, (ghosts + given)[-1], 1, ghosts, given)
    handle = cursor
    stopped = without_gradients(graph)
    for key, node in enumerate(trainable):
        readers = [user for user in sorted(node.users) if user not in stopped]
        written = [user for user in sorted(node.users) if user in stopped and op_name(user.target).endswith("_")]
        with graph.inserting_after(cursor):
            cursor = single = graph.call_function(SingleTarget(key), (tape, handle, node))
        for reader in readers:
            if written and written[0] < reader:  # what is written without gradients goes to the parameter itself
                written = [write for write in written if not write < reader]
                with graph.inserting_before(reader):
                    single = graph.call_function(SingleTarget(key), (tape, handle, node))
            reader.replace_input_with(node, single)
    return gm
