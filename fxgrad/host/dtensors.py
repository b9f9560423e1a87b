"""DTensors: how autograd noted that a local tensor was made of one.

The modules of PyTorch are looked at only where the user has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fxgrad.host.autograd import function_of


def dtensor_type() -> Any:
    """Return PyTorch's class of DTensors; None where no program has imported it.

    Why: a model without them imports nothing of PyTorch's for their sake.
    Without: fxgrad would import them in every program.
    """
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


class Chain(NamedTuple):
    """``source.redistribute(..).to_local(..)``, as its backward knows it.

    Why: see `chain_of`.
    Without: see `chain_of`.
    """

    source: Any
    placements: tuple[Any, ...]  # of what was made local
    grad_placements: tuple[Any, ...]
    settings: Mapping[str, Any]  # all that the two nodes have noted for the backward


def chain_of(value: Tensor) -> Chain | None:
    """Return how a tensor was made by ``redistribute`` and ``to_local`` of a leaf, and by nothing else; or None.

    Why: a property of the user's says nowhere what it does to a parameter; the graph of its result does.
    Without: parameters that SimpleFSDP gathers are refused as DTensors of the user's own.
    """
    functions = [
        getattr(sys.modules.get(f"torch.distributed.tensor.{module}"), name, None)
        for module, name in (("_api", "_ToTorchTensor"), ("_redistribute", "Redistribute"))
    ]
    nodes: list[Any] = []
    node: Any = value.grad_fn
    for function in functions:
        if function is None or not _is_of(node, function):
            return None
        nodes.append(node)
        node, *others = [edge for edge, _ in node.next_functions if edge is not None] or [None]
        if others:
            return None
    source = getattr(node, "variable", None)
    if source is None:
        return None
    settings = {name: one for made in nodes for name, one in vars(made).items()}
    local, _ = nodes
    return Chain(source, tuple(local.dtensor_spec.placements), tuple(local.grad_placements or ()), settings)


def _is_of(node: Any, function: type) -> bool:
    """Return whether an autograd.Function made a node."""
    return isinstance(node, BackwardCFunction) and function_of(type(node)) is function
