"""Put the bodies of checkpoints and nested compile regions where they are called."""

from __future__ import annotations

from itertools import count
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxgrad.graph.context import OF_A_CHECKPOINT, Context
from fxgrad.graph.edit import function_of
from fxgrad.ops.inlining import inline
from fxgrad.runtime.checkpointing import policy_of

# Where each operator that runs a body once has its operands; a body is its first argument.
_OPERANDS = {
    "higher_order::tag_activation_checkpoint": 1,
    "higher_order::invoke_subgraph": 2,
    "higher_order::wrap": 1,
}
_IDS = count(1)


def inline_regions(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no op that runs a body once.

    ``checkpoint(body, x, w)`` -> the body's ops, tagged for AOTAutograd's partitioner to compute them again in the
    backward, as the checkpoint operator itself would tag them; those of a selective one have its ``policy``. A tap
    among them is part of the one graph.
    """
    while regions := [node for node in gm.graph.nodes if function_of(node) in _OPERANDS]:
        for node in regions:
            _inline(gm, node)
    return gm


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    name, attribute = function_of(node), node.args[0]
    assert isinstance(attribute, fx.Node)
    body = getattr(gm, str(attribute.target))
    checkpointed = name == "higher_order::tag_activation_checkpoint"
    around = {key: node.meta[key] for key in OF_A_CHECKPOINT & node.meta.keys()}
    tags = _of_a_checkpoint(body) if checkpointed else around
    inline(gm, node, body, node.args[_OPERANDS[name] :], lambda copy, inner: copy.meta.update(tags))
    if not attribute.users:
        gm.graph.erase_node(attribute)


def _of_a_checkpoint(body: Any) -> dict[str, Any]:
    """Return the tags of a checkpoint's nodes. A later id is an inner checkpoint's."""
    graph_id = next(_IDS)
    policy = policy_of(body, graph_id)
    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": graph_id, "policy": policy}
