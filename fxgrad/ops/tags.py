"""What PyTorch says of its operators by tags."""

from __future__ import annotations

import torch
from torch import fx

from fxgrad.host.ops import OpOverload


def has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    """Return whether a node calls an operator that has a tag."""
    return isinstance(node.target, OpOverload) and tag in node.target.tags


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node computes each number of its result of one number of each operand."""
    return has_tag(node, torch.Tag.pointwise)
