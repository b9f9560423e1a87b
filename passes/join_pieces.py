"""Do to the whole what is done to each piece of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context, place_beside, without_gradients
from fxgrad.graph.edit import made_of
from fxgrad.ops.calls import alike, bind, equal, op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.families import RANDOM, Family, family_of
from fxgrad.ops.values import memory
from fxgrad.ops.written import tensors_written, writers_by_memory
from fxgrad.samples.symbols import expression

_CUTS = frozenset({"chunk", "split", "tensor_split", "split_with_sizes"})
_PLACES = frozenset({"indices_or_sections", "sections", "indices", "tensor_indices_or_sections"})
_PURE = frozenset(
    {Family.ELEMENTWISE, Family.MOVEMENT, Family.REDUCTION, Family.CONTRACTION, Family.NORMALISED, Family.ALONG}
)


def join_pieces(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no rows are cut apart, each treated alone, and put together again.

    ``cat([f(c) for c in h.chunk(2)])`` -> ``f(h)``, where f does the same to each row, whatever the other rows are.
    Pieces of the batch hold several samples each, in places that no number of samples has in common with another.
    ``cat(list(h))`` -> ``h.clone().flatten(0, 1)``, and ``stack(list(h))`` -> ``h.clone()``.
    """
    for node in list(gm.graph.nodes):
        name = op_name(node.target) if node.op in ("call_function", "call_method") else ""
        if name == "stack":
            _join_rows(gm.graph, node, flat=False)
        elif name == "cat" and not _join_rows(gm.graph, node, flat=True):
            _join(gm.graph, node)
    return gm


def _join_rows(graph: fx.Graph, joined: fx.Node, *, flat: bool) -> bool:
    """Replace all rows of a value, put together in their order, by a copy of it; return whether they are that."""
    rows = [_row(one) for one in _joined(joined)]
    whole = rows[0][0] if rows else None
    value = None if whole is None else EXAMPLE.get(whole)
    if whole is None or not isinstance(value, Tensor) or value.dim() < 1 + flat:
        return False
    # Dynamo took the rows one by one, so its graph is for this number of rows alone.
    if len(rows) < 2 or expression(value.shape[0]) != len(rows) or rows != [(whole, i) for i in range(len(rows))]:
        return False
    taken = {arg for one in _joined(joined) for arg in (one, *one.all_input_nodes)} - {whole}
    stopped = without_gradients(graph)
    if any((node in stopped) != (joined in stopped) for node in taken):
        return False
    if memory(whole) is None or writers_by_memory(graph)[memory(whole)]:
        return False
    with graph.inserting_before(joined):
        result = graph.call_method("clone", (whole,), {"memory_format": torch.contiguous_format})
        place_beside(joined, result)
        EXAMPLE.put(result, value.clone(memory_format=torch.contiguous_format))
        if flat:
            result = graph.call_method("flatten", (result, 0, 1))
    result.meta = dict(joined.meta)
    joined.replace_all_uses_with(result)
    for node in [joined, *sorted(taken, reverse=True)]:
        if not node.users:
            graph.erase_node(node)
    return True


def _joined(node: fx.Node) -> Sequence[Any]:
    """Return what a ``cat`` or ``stack`` along dimension 0 puts together; nothing for any other call of them."""
    values = node.args[0] if node.args else None
    if not isinstance(values, tuple | list) or not all(isinstance(one, fx.Node) for one in values):
        return ()
    first = not any(node.args[1:]) and node.kwargs.keys() <= {"dim"} and node.kwargs.get("dim", 0) == 0
    return values if first else ()


def _row(node: fx.Node) -> tuple[fx.Node | None, Any]:
    """Return the value of which a node is a row, and the row's place: ``h[2]``, ``h.unbind()[2]``."""
    source, place = node.args if op_name(node.target) == "getitem" and len(node.args) == 2 else (None, None)
    if not isinstance(source, fx.Node) or type(place) is not int:
        return None, None
    if op_name(source.target) == "unbind" and not any(source.args[1:]) and not any(source.kwargs.values()):
        whole = source.args[0] if source.args else None
        return (whole, place) if isinstance(whole, fx.Node) else (None, None)
    return source, place


def _join(graph: fx.Graph, cat: fx.Node) -> None:
    results = _joined(cat)
    if not results:
        return
    cut = _cut(results[0])
    pieces = None if cut is None else _pieces(cut)
    if cut is None or pieces is None or len(pieces) != len(results):
        return
    regions = [_Region(piece) for piece in pieces]
    first = regions[0]
    if not all(region.closed(cat) for region in regions) or not all(map(first.rowwise, first.nodes)):
        return
    alike = all(_same(results[0], other, first, region) for other, region in zip(results, regions, strict=True))
    treated = {cut, *pieces, *(node for region in regions for node in region.nodes)}
    if not alike or not all(node in treated or _changes_nothing(node) for node in _between(cut, cat)):
        return
    whole = cut.args[0]
    assert isinstance(whole, fx.Node)
    result = whole if results[0] is pieces[0] else results[0]
    pieces[0].replace_all_uses_with(whole)
    written = writers_by_memory(graph)[memory(cat)]  # an op's result may be kept for its backward
    if written or not _is_own_copy(results[0], pieces[0]):
        with graph.inserting_before(cat):
            result = graph.call_method("clone", (result,), {"memory_format": torch.contiguous_format})
        result.meta = dict(cat.meta)
    cat.replace_all_uses_with(result)
    gone = [*[node for region in regions[1:] for node in region.nodes], *pieces, cut, cat]
    for node in sorted(gone, reverse=True):
        graph.erase_node(node)


def _cut(result: fx.Node) -> fx.Node | None:
    """Return the op that cut the value of which this is a piece, or made of one."""
    for node in (result, *made_of(result)):
        source = node.args[0] if op_name(node.target) == "getitem" and node.args else None
        if isinstance(source, fx.Node) and source.op != "placeholder" and op_name(source.target) in _CUTS:
            along = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else 0)
            return source if along == 0 and source.args else None
    return None


def _pieces(cut: fx.Node) -> list[fx.Node] | None:
    """The pieces in their order, if each row is in one of them, each is read once, and nothing else is read of them."""
    value = EXAMPLE.get(cut)
    pieces = {user.args[1]: user for user in cut.users if op_name(user.target) == "getitem"}
    whole = isinstance(value, tuple | list) and pieces.keys() == set(range(len(value))) and _parts(cut)
    return [pieces[i] for i in range(len(pieces))] if whole and len(pieces) == len(cut.users) else None


def _parts(cut: fx.Node) -> bool:
    """Return whether a cut gives each row to one piece, in order: ``tensor_split((4, 2))`` gives some to two pieces."""
    places = cut.args[1] if len(cut.args) > 1 else next((cut.kwargs[key] for key in _PLACES & cut.kwargs.keys()), None)
    if op_name(cut.target) != "tensor_split" or isinstance(places, int):
        return True
    if not isinstance(places, tuple | list):
        return False
    if len(places) < 2:  # one place, whatever it is, has rows before it and rows behind it
        return True
    numbers = [place for place in places if isinstance(place, int)]
    same_end = min(numbers, default=0) >= 0 or max(numbers, default=0) < 0
    return len(numbers) == len(places) and numbers == sorted(numbers) and same_end


def _between(cut: fx.Node, cat: fx.Node) -> Iterator[fx.Node]:
    node = cut.next
    while node is not cat:
        yield node
        node = node.next


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a call leaves every later piece in the state that the first was in: no value written, no mode set."""
    if node.op not in ("call_function", "call_method"):
        return True
    value = EXAMPLE.get(node)
    counts = isinstance(value, int | float | torch.Size | torch.SymInt | torch.SymFloat | torch.SymBool)
    return bool(node.users) and not tensors_written(node) and (counts or family_of(op_name(node.target)) in _PURE)


def _is_own_copy(result: fx.Node, piece: fx.Node) -> bool:
    """Return whether a result has memory of its own, in the order of its dimensions, as what ``cat`` gives has."""
    value, size = EXAMPLE.of(result), sympy.Integer(1)
    for length, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if expression(stride) != size:
            return False
        size *= expression(length)
    return memory(result) != memory(piece)


class _Region:
    """What is made of one piece."""

    def __init__(self, piece: fx.Node) -> None:
        self.piece = piece
        self.nodes: list[fx.Node] = []
        seen = {piece}
        stack = list(piece.users)
        while stack:
            node = stack.pop()
            if node not in seen and op_name(node.target) not in ("cat", "concat", "concatenate"):
                seen.add(node)
                self.nodes.append(node)
                stack.extend(node.users)

    def closed(self, cat: fx.Node) -> bool:
        """Return whether nothing of it is read elsewhere."""
        region = {self.piece, *self.nodes, cat}
        return all(region.issuperset(node.users) for node in (self.piece, *self.nodes))

    def rowwise(self, node: fx.Node) -> bool:
        """Return whether an op makes each row of what it gives of the same row of what it gets, and of no other."""
        name, rank = op_name(node.target), _rank(node)
        rows = [arg for arg in node.all_input_nodes if arg in (self.piece, *self.nodes)]
        others = [arg for arg in node.all_input_nodes if arg not in rows]
        if node.op == "output" or rank < 1 or any(_rank(arg) != rank for arg in rows):
            return False
        call, first = bind(node), node.args[0] if node.args else None
        if tensors_written(node):
            if not (call.inplace and first in self.nodes and self._own_memory(node)):
                return False
            name = call.op
        if name == "dropout":
            return node.args[2:3] == (False,) or node.kwargs.get("training") is False
        if family_of(name) is Family.ELEMENTWISE and name not in RANDOM:
            return all(_rank(arg) < rank for arg in others)  # along the rows it is not read
        second = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape", node.kwargs.get("dim"))
        if name in ("softmax", "log_softmax"):
            return isinstance(second, int) and second not in (0, -rank)
        if name == "layer_norm" and not (isinstance(second, tuple | list) and len(second) < rank):
            return False
        if name == "instance_norm" and call.get("running_mean") is not None and call.get("use_input_stats", True):
            return False  # it writes the running statistics once for each piece
        fits = {
            "linear": rank > 1,
            "matmul": rank > 1 and [_rank(arg) for arg in others] == [2],
            **dict.fromkeys(("layer_norm", "group_norm", "instance_norm"), True),
            **{f"conv{dims}d": rank == 2 + dims for dims in (1, 2, 3)},
        }
        once = [*node.args, *node.kwargs.values()].count(first) == 1
        return once and rows == [first] and fits.get(name, False)

    def _own_memory(self, node: fx.Node) -> bool:
        """Return whether a value lies in memory that was made here."""
        given = [arg for one in self.nodes for arg in one.all_input_nodes if arg not in self.nodes]
        return memory(node) not in {None, *map(memory, given)}


def _rank(node: fx.Node) -> int:
    value = EXAMPLE.get(node)
    return value.dim() if isinstance(value, Tensor) else -1


def _same(one: Any, other: Any, first: _Region, region: _Region) -> bool:
    """Return whether the second is of its piece what the first is of the first, by the same calls in the same order."""
    twins: dict[fx.Node, fx.Node] = {}

    def same(one: Any, other: Any) -> bool:
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return equal(one, other)
        if one is first.piece or other is region.piece:
            return one is first.piece and other is region.piece
        if one not in first.nodes:
            return one is other
        if twins.setdefault(one, other) is not other:
            return False
        calls = [(node.op, node.target, node.args, dict(node.kwargs)) for node in (one, other)]
        return calls[0][:2] == calls[1][:2] and alike(calls[0][2:], calls[1][2:], same)

    return same(one, other) and [twins.get(node) for node in sorted(first.nodes)] == sorted(region.nodes)
