"""A body in the place of the call that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxgrad.ops.calls import map_nodes, op_name
from fxgrad.ops.values import attribute


def inline(
    gm: fx.GraphModule,
    node: fx.Node,
    body: fx.GraphModule,
    operands: Sequence[Any],
    leave: Callable[[fx.Node, fx.Node], None],
) -> None:
    """Put a body's nodes in the place of ``node``, its inputs being ``operands``.

    ``leave(copy, inner)`` says what is known of the copy of each of the body's nodes. Constants and bodies
    that the body holds become attributes of ``gm``.
    """
    inputs = body.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    with gm.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            if inner.op == "get_attr":
                name = f"{node.name}_{str(inner.target).replace('.', '_')}"
                setattr(gm, name, attribute(body, inner))
                env[inner] = gm.graph.create_node("get_attr", name)  # get_attr() warns of what is no buffer
                env[inner].meta = dict(inner.meta)
            else:
                env[inner] = gm.graph.node_copy(inner, env.__getitem__)
            leave(env[inner], inner)
    result = map_nodes(body.graph.output_node().args[0], env.__getitem__)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            if op_name(user.target) == "getitem":
                user.replace_all_uses_with(result[user.args[1]])
                gm.graph.erase_node(user)
    gm.graph.erase_node(node)
