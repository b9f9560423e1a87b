"""Values on which a model calls ``requires_grad_()``: they have one name, and stay inside of the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, fx

from fxgrad.capture.dynamo_errors import NAMED_TWICE
from fxgrad.errors import GraphBreak
from fxgrad.graph.context import source_line, without_gradients
from fxgrad.host.leaves import BEGINS
from fxgrad.host.ops import HigherOrderOperator
from fxgrad.host.pytree import tree_leaves
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.values import names_of
from fxgrad.ops.written import tensors_written
from fxgrad.passes.unite_names import returned_as_it_is


def check_requires_grad(gm: fx.GraphModule, traced: Collection[str], inlined: Callable[[], fx.GraphModule]) -> None:
    """Refuse what would require a gradient in eager PyTorch, and would not here. See `leaves_followed`.

    ``gm`` is a graph as Dynamo left it, ``inlined()`` the same with the bodies of checkpoints in it. ``traced`` are the
    names of inputs and parameters that require a gradient.
    """
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    begun = [node for node in nodes if BEGINS in node.meta]
    kept = [node for node in nodes if node.op == "call_method" and node.target == "requires_grad_"]
    for node in [*kept, *(node for node in begun if _is_named_before(node))]:
        sentence, advice = NAMED_TWICE
        raise GraphBreak(sentence, where=source_line(node), advice=advice)
    if begun:
        _check_kept(inlined().graph, traced)


def _is_named_before(node: fx.Node) -> bool:
    """Return whether a value whose flag changes has a name from before, such as that of a dropout that is off.

    Dynamo knows such a name as another tensor, which has the flag of the time when it was made.
    """
    last_nodes = node.meta[BEGINS]
    names = [user for user in node.users if returned_as_it_is(user) is node or _has_body(user)]
    return returned_as_it_is(node) is not None or any(not last < name for last in last_nodes for name in names)


def _has_body(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator)


def _check_kept(graph: fx.Graph, traced: Collection[str]) -> None:
    """Refuse outputs, and inputs and buffers that are written to, with such a flag."""
    reached = _reached(graph, traced)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.name not in traced]
    for node in [*graph.output_node().all_input_nodes, *inputs]:
        if _requires_grad(node) and node not in reached:
            raise GraphBreak(
                "the model returns or keeps a value that requires a gradient by requires_grad_() alone: the graph "
                "would not give it one",
                where=source_line(node),
                advice="Return it detached (h.detach()), keep it out of attributes, or leave out what returns it, such "
                "as use_cache=True or output_hidden_states=True.",
            )


def _reached(graph: fx.Graph, traced: Collection[str]) -> set[fx.Node]:
    """Return the values that a gradient of an input or a parameter may belong to."""
    stopped, reached = without_gradients(graph), set[fx.Node]()
    for node in graph.nodes:
        begins = node.name in traced if node.op == "placeholder" else node.op == "get_attr"
        carries = begins or not reached.isdisjoint(node.all_input_nodes)
        if carries and node not in stopped and _requires_grad(node):
            for written in [node, *tensors_written(node)]:
                reached.update(names_of(written))
    return reached


def _requires_grad(node: fx.Node) -> bool:
    values: list[Any] = tree_leaves(EXAMPLE.get(node))
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)
