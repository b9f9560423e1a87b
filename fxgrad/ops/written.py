"""What a call writes into: in place, by ``out=``, or as its schema says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from fxgrad.host.ops import overload_of, schemas
from fxgrad.ops.calls import Call
from fxgrad.ops.facts import FAKE


def written_to(node: fx.Node, call: Call) -> list[fx.Node]:
    """Every tensor that a call writes into."""
    places: list[fx.Node] = []
    fx.map_arg(places_of_result(call), places.append)
    return [*filter(_is_tensor, places), *declared(node, call)]


def places_of_result(call: Call) -> Any:
    """Where the result lies, a nest like it: the first argument of an op in place, or ``out=``; None if neither."""
    return next(iter(call.arguments.values()), None) if call.inplace else call.get("out")


def result_written(call: Call, result: Any) -> Iterator[tuple[fx.Node, Any]]:
    """Each tensor in which a part of the result lies, with what `result` says of that part."""

    def pairs(places: Any, part: Any) -> Iterator[tuple[fx.Node, Any]]:
        if isinstance(places, fx.Node):
            yield places, part
        elif isinstance(places, tuple | list):
            parts = part if isinstance(part, list) else [part] * len(places)
            for place, one in zip(places, parts, strict=False):
                yield from pairs(place, one)

    return (pair for pair in pairs(places_of_result(call), result) if _is_tensor(pair[0]))


def declared(node: fx.Node, call: Call) -> list[fx.Node]:
    """The tensors that a schema says are written, but for those in which the result lies."""
    found: list[fx.Node] = []
    for schema in schemas(overload_of(node.target)):  # of several overloads the arguments choose one
        arguments = schema.arguments
        given = {argument.name: arg for argument, arg in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
        names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write and not a.is_out}
        if call.inplace:
            names -= {arguments[0].name}
        for name in names:
            fx.map_arg(given.get(name), found.append)
    return list(dict.fromkeys(filter(_is_tensor, found)))


def _is_tensor(place: fx.Node) -> bool:
    return isinstance(FAKE.get(place), Tensor)
