"""Inputs that a model writes into are read from a copy, which the backward may read, too.

    old = self.b.clone()                 b0 = snapshot(b)
    h = x * old                   ->     h = x * b0                 the backward reads b0
    self.b.mul_(0.9)                     b.copy_(b0 * 0.9)

AOTAutograd's partitioner lets a backward compute cheap values again from a graph's inputs, and drops copies, though
the forward has written into the input by then. PyTorch's own compiled models have wrong gradients there.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxgrad.kernels.operators import operator


def _fake(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@operator(_fake)
def snapshot(value: Tensor) -> Tensor:
    """Return a copy that no compiler drops or makes again."""
    return value.clone()


def keep_unchanged(graph: fx.Graph) -> None:
    """Change a traced graph of a forward with its backward, which writes into an input by a copy at its end."""
    last = list(graph.find_nodes(op="placeholder"))[-1]
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    for node in dict.fromkeys(write.args[0] for write in writes):
        readers = [user for user in node.users if user.op != "output" and not _writes_back(user, node)]
        if node.op != "placeholder" or not readers:
            continue
        with graph.inserting_after(last):
            copy = graph.call_function(torch.ops.fxgrad.snapshot.default, (node,))
        copy.meta = {**node.meta, "val": node.meta["val"].clone()}
        node.replace_all_uses_with(copy, delete_user_cb=readers.__contains__)


def _writes_back(user: fx.Node, node: fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is node
