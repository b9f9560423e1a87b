"""Let the policies of selective checkpoints be asked when the graph is traced."""

from __future__ import annotations

from torch import fx

from fxgrad.graph.context import Context
from fxgrad.runtime.checkpointing import POLICY, AskedTarget, Policy
from fxgrad.runtime.targets import Target


def ask_policies(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: what a selective checkpoint holds has its ``policy``. After: each such op asks it while it is traced.

    Taps, and what else fxgrad adds, are not the policy's to decide: they keep the checkpoint's own tag.
    """
    regions: dict[Policy, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        policy = POLICY.get(node)
        if policy is not None and node.op in ("call_function", "call_method") and not isinstance(node.target, Target):
            regions.setdefault(policy, []).append(node)
    for policy, nodes in regions.items():
        for node in nodes:
            target = AskedTarget(node.target, policy, node is nodes[0], node is nodes[-1])
            node.op, node.target = "call_function", target
    return gm
