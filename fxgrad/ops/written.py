"""What a call writes into: in place, by ``out=``, or as its schema says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from fxgrad.host.ops import overload_of, schemas
from fxgrad.ops.calls import CALL, Call, leaves
from fxgrad.ops.facts import EXAMPLE, FAKE
from fxgrad.ops.values import memory_of


def written_to(node: fx.Node, call: Call) -> list[fx.Node]:
    """Return every tensor that a call writes into."""
    return [*filter(_is_tensor, leaves(places_of_result(call))), *declared(node, call)]


def writes_of(graph: fx.Graph) -> list[tuple[fx.Node, int | None]]:
    """Return every call of a graph that writes, once for each tensor, with the memory that it writes to."""
    calls = [(node, CALL.of(node)) for node in graph.nodes if CALL.on(node)]
    return [(node, memory_of(FAKE.of(base))) for node, call in calls for base in written_to(node, call)]


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
    """Return the tensors that a schema says are written, without those in which the result lies."""
    places: list[fx.Node] = []
    for schema in schemas(overload_of(node.target)):  # of several overloads the arguments choose one
        arguments = schema.arguments
        values = {argument.name: arg for argument, arg in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
        names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write and not a.is_out}
        if call.inplace:
            names -= {arguments[0].name}
        places += [place for name in names for place in leaves(values.get(name))]
    return list(dict.fromkeys(filter(_is_tensor, places)))


def _is_tensor(place: Any) -> bool:
    return isinstance(place, fx.Node) and isinstance((FAKE if FAKE.on(place) else EXAMPLE).get(place), Tensor)
