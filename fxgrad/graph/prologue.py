"""What stands at the head of a transformed graph: ghosts, the tape, and Collect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxgrad.graph.context import Context
from fxgrad.runtime.tape import Like
from fxgrad.runtime.targets import CollectTarget, NewTape


def add_ghosts(graph: fx.Graph, ctx: Context) -> tuple[list[fx.Node], list[fx.Node]]:
    """New inputs behind the others: a ghost for each tensor that is delivered, and what the quantities are given."""
    nodes = {parameter.name: parameter.node for parameter in ctx.parameters}
    cursor = graph.find_nodes(op="placeholder")[-1]
    made: list[list[fx.Node]] = [[], []]
    ghosts, given = ctx.deliveries(1), ctx.given(1)
    for kind, (group, word) in enumerate(((ghosts, "ghost"), (given, "given"))):
        for i, delivery in enumerate(group):
            whose = f"model_{i}" if delivery.parameter is None else nodes[delivery.parameter]
            name = f"{word}_{whose}" if delivery.place == "grad_sample" else f"{word}_{delivery.place}_{whose}"
            with graph.inserting_after(cursor):
                cursor = graph.placeholder(name)
            ctx.labels[cursor.name] = (
                f"{word}({delivery.parameter})"
                if delivery.place == "grad_sample"
                else f"{word}({delivery.parameter or 'model'}.{delivery.place})"
            )
            made[kind].append(cursor)
    return made[0], made[1]


def open_tape(
    graph: fx.Graph, ctx: Context, before: fx.Node, n: Any, ghosts: Sequence[fx.Node], given: Sequence[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """``tape = new_tape(); handle = collect(tape, n, ghosts.., given..)`` behind a node."""
    likes = [Like(parameter.name, parameter.shape, parameter.dtype) for parameter in ctx.parameters]
    with graph.inserting_after(before):
        tape = graph.call_function(NewTape(ctx.quantities, ctx.loss_scale, likes, ctx.counts_given(), ctx.planner))
    with graph.inserting_after(tape):
        handle = graph.call_function(CollectTarget(len(ghosts)), (tape, n, *ghosts, *given))
    return tape, handle
