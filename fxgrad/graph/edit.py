"""Additions to a graph: calls with the facts of earlier passes, gradient placeholders, the tape and Collect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context, place_beside
from fxgrad.host.dispatch import enable_python_dispatcher
from fxgrad.host.pytree import tree_leaves
from fxgrad.ops.calls import CALL, bind, map_nodes, op_name
from fxgrad.ops.facts import FAKE, TRACED, put_facts
from fxgrad.runtime.tape import Like
from fxgrad.runtime.targets import CollectTarget, NewTape


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
    """Return a call of a function, or of the method of that name, where the graph inserts; part of the node ``beside``.

    What an op in place returns is its first argument.
    """
    method, given = isinstance(target, str), kwargs or {}
    node = graph.create_node("call_method" if method else "call_function", target, tuple(args), given)
    values, named = map_nodes([list(args), given], FAKE.of)
    call = getattr(torch.Tensor, target) if isinstance(target, str) else target
    with torch.no_grad(), ctx.symbols.mode, enable_python_dispatcher():
        fake = values[0] if inplace else call(*values, **named)
    put_facts_beside(beside, node, fake)
    return node


def put_facts_beside(node: fx.Node, new: fx.Node, fake: Any, *, stops: bool = False) -> None:
    """Leave on a new node, a part of another one, what the passes before would have found out about it.

    A gradient flows on wherever one flows in, if it does not stop here.
    """
    arrives = not stops and any(flows_through(arg) for arg in new.all_input_nodes)
    put_facts(new, {FAKE: fake, TRACED: _flow(fake, arrives)})
    place_beside(node, new)
    if new.op in ("call_function", "call_method"):
        CALL.put(new, bind(new))


def flows_through(node: fx.Node) -> bool:
    """Return whether a gradient flows through a value, or through one of an op's several."""
    return any(tree_leaves(TRACED.of(node)))


def _flow(fake: Any, arrives: bool) -> bool | list[Any]:
    if isinstance(fake, tuple | list):
        return [_flow(item, arrives) for item in fake]
    return isinstance(fake, Tensor) and fake.is_floating_point() and arrives


def is_inplace(node: fx.Node) -> bool:
    """Return whether a node calls an op by the name of its form in place: ``mul_``."""
    name = op_name(node.target) if node.op in ("call_function", "call_method") else ""
    return name.endswith("_") and not name.endswith("__")


def replace_outputs(node: fx.Node, values: Sequence[fx.Node]) -> None:
    """Let the readers of a call's outputs read other values, and erase the call."""
    for user in list(node.users):
        assert op_name(user.target) == "getitem" and isinstance(user.args[1], int)
        user.replace_all_uses_with(values[user.args[1]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


HOOKED = "higher_order::register_hook"  # what Dynamo writes for it, as `function_of` names it


def function_of(node: fx.Node) -> str:
    """Return the name of the function that a node calls; "" for any other node."""
    return op_name(node.target) if node.op == "call_function" else ""


def made_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that a value is made of, the nearest first."""
    queue = deque([node])
    seen = {node}
    while queue:
        fresh = [arg for arg in queue.popleft().all_input_nodes if arg not in seen]
        seen.update(fresh)
        queue.extend(fresh)
        yield from fresh


def bind_again(nodes: Iterable[fx.Node]) -> None:
    """Let the calls of nodes name the operands that the nodes have by now."""
    for node in nodes:
        if CALL.on(node):
            CALL.put(node, bind(node))


def outputs_of(gm: fx.GraphModule) -> Sequence[Any]:
    """Return the nodes that a graph returns, and the constants among them."""
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    return outputs


def add_placeholders(graph: fx.Graph, ctx: Context) -> tuple[list[fx.Node], list[fx.Node]]:
    """Add inputs behind the others: a gradient placeholder for each delivery, and what the quantities are given."""
    nodes = {parameter.name: parameter.node for parameter in ctx.parameters}
    cursor = graph.find_nodes(op="placeholder")[-1]
    made: list[list[fx.Node]] = [[], []]
    placeholders, given = ctx.deliveries(1), ctx.given(1)
    for kind, (group, word) in enumerate(((placeholders, "grad_placeholder"), (given, "given"))):
        for i, delivery in enumerate(group):
            whose = f"model_{i}" if delivery.parameter is None else nodes[delivery.parameter]
            place = [] if delivery.place == "grad_sample" else [delivery.place]
            with graph.inserting_after(cursor):
                cursor = graph.placeholder("_".join([word, *place, whose]))
            ctx.labels[cursor.name] = f"{word}({'.'.join([delivery.parameter or 'model', *place])})"
            made[kind].append(cursor)
    return made[0], made[1]


def open_tape(
    graph: fx.Graph, ctx: Context, before: fx.Node, n: Any, placeholders: Sequence[fx.Node], given: Sequence[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """``tape = new_tape(); handle = collect(tape, n, placeholders.., given..)`` behind a node."""
    likes = [Like(parameter.name, parameter.shape, parameter.dtype) for parameter in ctx.parameters]
    with graph.inserting_after(before):
        tape = graph.call_function(NewTape(ctx.quantities, ctx.loss_scale, likes, ctx.counts_given(), ctx.planner))
    with graph.inserting_after(tape):
        handle = graph.call_function(CollectTarget(len(placeholders)), (tape, n, *placeholders, *given))
    return tape, handle
