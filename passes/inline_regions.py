"""Put the bodies of checkpoints and nested compile regions where they are called."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxgrad.calls import op_name
from fxgrad.context import Context
from fxgrad.inlining import inline

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
    backward, as the checkpoint operator itself would tag them. A tap among them is part of the one graph.
    """
    while regions := [node for node in gm.graph.nodes if _name(node) in _OPERANDS]:
        for node in regions:
            _inline(gm, node)
    return gm


def _name(node: fx.Node) -> str:
    return op_name(node.target) if node.op == "call_function" else ""


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    name, attribute = _name(node), node.args[0]
    assert isinstance(attribute, fx.Node)
    body = getattr(gm, str(attribute.target))
    checkpointed = name == "higher_order::tag_activation_checkpoint"
    inline(gm, node, body, node.args[_OPERANDS[name] :], _tagging(node, checkpointed))
    if not attribute.users:
        gm.graph.erase_node(attribute)


def _tagging(node: fx.Node, checkpointed: bool) -> Callable[[fx.Node, fx.Node], None]:
    """The tags of a checkpoint, or those of the region around it. A later id is an inner checkpoint's."""
    tags: dict[str, Any] = {key: node.meta[key] for key in ("recompute", "ac_graph_id") if key in node.meta}
    if checkpointed:
        tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(_IDS)}

    def tag(copy: fx.Node, inner: fx.Node) -> None:
        copy.meta.update(tags)

    return tag
