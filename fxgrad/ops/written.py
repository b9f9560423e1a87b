"""What a node writes into: in place, by ``out=``, as its schema says, or by ``ctx.mark_dirty``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from fxgrad.host.ops import overload_of, schemas
from fxgrad.ops.calls import CALL, Call, bind, leaves
from fxgrad.ops.facts import value_of
from fxgrad.ops.user_functions import UserFunction
from fxgrad.ops.values import memory


def tensors_written(node: fx.Node) -> list[fx.Node]:
    """Return every tensor that a node writes into, in a graph as Dynamo left it or behind the passes."""
    if node.op not in ("call_function", "call_method"):
        return []
    call = CALL.get(node) or bind(node)
    return [*filter(_is_tensor, leaves(places_of_result(call))), *declared(node, call), *dirty(node)]


def writers_by_memory(graph: fx.Graph) -> Mapping[int | None, list[fx.Node]]:
    """Return the nodes that write into each memory, in their order."""
    writers: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for place in set(map(memory, tensors_written(node))):
            writers[place].append(node)
    return writers


def places_of_result(call: Call) -> Any:
    """Return the nest in which the result lies: the first argument of an op in place, or ``out=``; None if neither."""
    return next(iter(call.arguments.values()), None) if call.inplace else call.get("out")


def result_written(call: Call, result: Any) -> Iterator[tuple[fx.Node, Any]]:
    """Yield each tensor in which a part of the result lies, with that part of ``result``."""

    def pairs(places: Any, part: Any) -> Iterator[tuple[fx.Node, Any]]:
        if isinstance(places, fx.Node):
            yield places, part
        elif isinstance(places, tuple | list):
            parts = part if isinstance(part, list) else [part] * len(places)
            for place, one in zip(places, parts, strict=False):
                yield from pairs(place, one)

    return (pair for pair in pairs(places_of_result(call), result) if _is_tensor(pair[0]))


def declared(node: fx.Node, call: Call) -> list[fx.Node]:
    """Return the tensors that a schema says are written, without those of `places_of_result`."""
    places: list[fx.Node] = []
    for schema in schemas(overload_of(node.target)):  # of several overloads the arguments choose one
        arguments = schema.arguments
        values = {argument.name: arg for argument, arg in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
        written = (a for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        names = {a.name for a in written if not (a.is_out and a.name == "out")}
        if call.inplace:
            names -= {arguments[0].name}
        places += [place for name in names for place in leaves(values.get(name))]
    return list(dict.fromkeys(filter(_is_tensor, places)))


def dirty(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a user's autograd.Function writes into: ``ctx.mark_dirty``."""
    arguments = [node.args[i] for i in node.target.dirty] if isinstance(node.target, UserFunction) else []
    return [arg for arg in arguments if isinstance(arg, fx.Node)]


def _is_tensor(place: Any) -> bool:
    return isinstance(place, fx.Node) and isinstance(value_of(place), Tensor)
