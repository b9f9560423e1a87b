"""Let the graph of a loss run its own backward: of `fxgrad.forward_backward`."""

from __future__ import annotations

from operator import getitem

from torch import fx

from fxgrad.graph.context import Context
from fxgrad.graph.edit import outputs_of
from fxgrad.ops.facts import FAKE, put_facts
from fxgrad.runtime.targets import Gradients, Leaf


def append_backward(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph that returns a loss. After: it also returns what arrives at the gradient placeholders.

    ``return loss`` -> ``gradients = gradients(loss, leaf, ..)``, where ``leaf`` stands for a gradient placeholder. No
    input requires a gradient any more. So AOTAutograd traces one graph, and every tap's backward while it does.
    """
    graph, output = gm.graph, gm.graph.output_node()
    deliveries, given = len(ctx.deliveries(1)), len(ctx.given(1))
    inputs = list(graph.find_nodes(op="placeholder"))
    leaves: list[fx.Node] = []
    for node in inputs[len(inputs) - given - deliveries : len(inputs) - given]:
        with graph.inserting_after(leaves[-1] if leaves else inputs[-1]):
            leaf = graph.call_function(Leaf("leaf"), (node,))
        node.replace_all_uses_with(leaf, lambda user, leaf=leaf: user is not leaf)
        put_facts(leaf, {FAKE: FAKE.get(node)})
        leaves.append(leaf)
    outputs = list(outputs_of(gm))
    loss = outputs[ctx.loss]
    with graph.inserting_before(output):
        gradients = graph.call_function(Gradients("gradients"), (loss, *leaves))
        results = [graph.call_function(getitem, (gradients, i)) for i in range(len(leaves))]
        outputs[ctx.loss] = graph.call_method("detach", (loss,))
        output.args = ((*outputs, *results),)
    return gm
