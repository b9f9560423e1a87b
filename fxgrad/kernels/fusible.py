"""Operators that a compiler may look into: one node for AOTAutograd, the ops inside for Inductor.

AOTAutograd functionalizes each node, infers its shape, and considers whether to save it. Norms, bounds and weights are
dozens of small ops for each use of a parameter; as operators they are one node each. Inductor fuses such ops with
others, so `opened` expands them in the graphs that it gets. Alike nodes are traced once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxgrad.host.dispatch import tracer
from fxgrad.host.fake import FakeTensor
from fxgrad.host.functorch import innermost_transform
from fxgrad.host.inductor import decompositions
from fxgrad.kernels.operators import operator

aten = torch.ops.aten
P = ParamSpec("P")
T = TypeVar("T")

FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # by operator: the function that it was made of


def fusible(fake: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function an operator where a tracer looks on; elsewhere its ops run as they are.

    ``fake`` gets the arguments, by position, and returns what the results are like. Results share no memory with
    arguments.
    """

    def make(function: Callable[P, T]) -> Callable[P, T]:
        made = operator(fake)(function)
        FUNCTIONS[getattr(torch.ops.fxgrad, function.__name__).default] = function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            is_traced = tracer() is not None and innermost_transform() is None
            return made(*args, **kwargs) if is_traced else function(*args, **kwargs)

        return cast("Callable[P, T]", call)

    return make


def opened(
    gm: fx.GraphModule, form_of: Callable[[fx.Node], Callable[..., Any] | None], but: Sequence[Any] = ()
) -> fx.GraphModule:
    """Replace each fusible operator of a traced graph by its ops, and others by those of what ``form_of`` returns.

    ``but`` are operators that stay.
    """
    traced: dict[Any, fx.Graph] = {}

    def functions() -> list[tuple[fx.Node, Callable[..., Any]]]:
        nodes = [node for node in gm.graph.nodes if node.target not in but]
        found = ((node, FUNCTIONS.get(node.target) or form_of(node)) for node in nodes)
        return [(node, function) for node, function in found if function is not None]

    while nodes := functions():
        for node, function in nodes:
            operands = node.all_input_nodes
            values = [one.meta["val"] for one in operands]
            key = node.target, str(_arguments(node, range(len(operands)))), *map(_described, values)
            if key not in traced:
                traced[key] = _traced(function, node, values)
            _replace(node, traced[key])
    _take_apart(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _take_apart(graph: fx.Graph) -> None:
    """``cat([a.unsqueeze(0), b.unsqueeze(0)])[1] -> b``: what is joined and taken apart is not written to memory."""
    for node in graph.find_nodes(op="call_function", target=aten.select.int):
        joint, dim, index = node.args
        if joint.target is aten.cat.default and joint.args[1:] in ((), (0,)) and dim == 0:
            rows = joint.args[0]
            if all(row.target is aten.unsqueeze.default and row.args[1] == 0 for row in rows):
                node.replace_all_uses_with(rows[index].args[0])
                graph.erase_node(node)


def _arguments(node: fx.Node, values: Sequence[Any]) -> Any:
    """Return a node's arguments with values in the place of the nodes among them."""
    by_node: dict[Any, Any] = dict(zip(node.all_input_nodes, values, strict=True))

    def value_of(argument: Any) -> Any:
        return by_node[argument] if isinstance(argument, fx.Node) else argument

    return fx.node.map_aggregate((node.args, node.kwargs), value_of)


def _described(value: Any) -> str:
    """Return all that ops ask a value without elements about."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{value.dtype} {value.device} {[*value.shape]} {value.stride()}"


def _traced(function: Callable[..., Any], node: fx.Node, values: Sequence[Any]) -> fx.Graph:
    """Trace the ops of an operator at these values, as Inductor wants them."""

    def run(*values: Any) -> Any:
        args, kwargs = _arguments(node, values)
        return function(*args, **kwargs)

    # Two nodes that were copied from one have one value, which the tracer would take for one tensor.
    apart = [value.detach() if isinstance(value, Tensor) else value for value in values]
    # A backward that is compiled late has no mode around it, and a number among tensors would be a real one.
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), contextlib.nullcontext())
    with mode, torch.no_grad():
        graph: fx.Graph = make_fx(run, decomposition_table=decompositions())(*apart).graph
    graph.eliminate_dead_code()
    return graph


def _replace(node: fx.Node, ops: fx.Graph) -> None:
    """Put a copy of some ops in a node's place."""
    copies: dict[fx.Node, fx.Node] = dict(zip(ops.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with node.graph.inserting_before(node):
        results: Any = node.graph.graph_copy(ops, copies)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            index: Any = user.args[1]
            user.replace_all_uses_with(results[index])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
