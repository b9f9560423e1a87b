"""Compute once what a graph of forward and backward computes more than once.

A rule that needs what the forward has computed inside of an op, such as the statistics of a group norm, computes it
again. AOTAutograd merges equal nodes where it parts the backward from the forward. In one graph of a whole step,
nothing does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxgrad.host.functorch import merge_equal_nodes
from fxgrad.host.ops import OpOverload

_NAMESPACES = "aten", "prims", "fxgrad"  # whose operators return the same for the same
_MODULES = "_operator", "math", "torch"  # of functions of sizes


def merge_equal(gm: fx.GraphModule) -> None:
    """Change a traced, functional graph, if none of its ops could be random or have a state of its own."""
    if all(_is_repeatable(node.target) for node in gm.graph.nodes if node.op == "call_function"):
        merge_equal_nodes(gm)


def _is_repeatable(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in _NAMESPACES and torch.Tag.nondeterministic_seeded not in target.tags
    return getattr(target, "__module__", None) in _MODULES
