"""New calls in a graph, with the facts on them that the passes before would have left there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context, place_beside
from fxgrad.host.dispatch import enable_python_dispatcher
from fxgrad.ops.calls import CALL, bind, map_nodes
from fxgrad.ops.facts import FAKE, TRACED, put_facts
from fxgrad.ops.values import tensors_of


def make(
    graph: fx.Graph,
    ctx: Context,
    target: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    beside: fx.Node,
    inplace: bool = False,
) -> fx.Node:
    """A call of a function, or of the method of that name, where the graph inserts; part of the node ``beside``.

    A gradient flows on wherever one flows in. What an op in place returns is its first argument.
    """
    method, given = isinstance(target, str), kwargs or {}
    node = graph.create_node("call_method" if method else "call_function", target, tuple(args), given)
    values = map_nodes(list(args), lambda arg: FAKE.of(arg))
    call = getattr(torch.Tensor, target) if isinstance(target, str) else target
    with torch.no_grad(), ctx.symbols.mode, enable_python_dispatcher():
        fake = values[0] if inplace else call(*values, **given)
    carries = any(tensor.is_floating_point() for tensor in tensors_of(fake))
    arrives = any(TRACED.of(arg) is True for arg in node.all_input_nodes)
    put_facts(node, {FAKE: fake, TRACED: isinstance(fake, Tensor) and carries and arrives})
    place_beside(beside, node)
    CALL.put(node, bind(node))
    return node


def bind_again(nodes: Iterable[fx.Node]) -> None:
    """Let the calls of nodes name the operands that the nodes have by now."""
    for node in nodes:
        if CALL.on(node):
            CALL.put(node, bind(node))
