"""Do to the whole what is done to each piece of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fxgrad.graph.context import Context
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.families import RANDOM, Family, family_of

_CUTS = frozenset({"chunk", "split", "tensor_split", "split_with_sizes"})
_NORMS = frozenset({"group_norm", "instance_norm"})


def join_pieces(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no rows are cut apart, each treated alone, and put together again.

    ``cat([f(c) for c in h.chunk(2)])`` -> ``f(h)``, where f does the same to each row, whatever the other rows are.
    Pieces of the batch hold several samples each, in places that no number of samples has in common with another.
    """
    for node in list(gm.graph.nodes):
        if node.op in ("call_function", "call_method") and op_name(node.target) in ("cat", "concat", "concatenate"):
            _join(gm.graph, node)
    return gm


def _join(graph: fx.Graph, cat: fx.Node) -> None:
    results = cat.args[0] if cat.args else None
    if not isinstance(results, tuple | list) or not all(isinstance(one, fx.Node) for one in results):
        return
    if any(cat.args[1:]) or cat.kwargs.get("dim", 0) != 0 or not results:
        return
    cut = _cut(results[0])
    pieces = None if cut is None else _pieces(cut)
    if pieces is None or len(pieces) != len(results):
        return
    regions = [_Region(piece) for piece in pieces]
    first = regions[0]
    if not all(region.closed(cat) for region in regions) or not all(map(first.rowwise, first.nodes)):
        return
    assert cut is not None
    whole = cut.args[0]
    alike = all(_same(results[0], other, first, region) for other, region in zip(results, regions, strict=True))
    if alike and isinstance(whole, fx.Node) and not _changes_between(cut, cat):
        result = whole if results[0] is pieces[0] else results[0]
        pieces[0].replace_all_uses_with(whole)
        cat.replace_all_uses_with(result)
        gone = [*[node for region in regions[1:] for node in region.nodes], *pieces, cut, cat]
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node in sorted(gone, key=order.__getitem__, reverse=True):
            graph.erase_node(node)


def _cut(result: fx.Node) -> fx.Node | None:
    """The op that cut the value of which this is a piece, or made of one."""
    stack, seen = [result], {result}
    while stack:
        node = stack.pop()
        source = node.args[0] if op_name(node.target) == "getitem" and node.args else None
        if isinstance(source, fx.Node) and source.op != "placeholder" and op_name(source.target) in _CUTS:
            along = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else 0)
            return source if along == 0 and source.args else None
        fresh = [one for one in node.all_input_nodes if one not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return None


def _pieces(cut: fx.Node) -> list[fx.Node] | None:
    """The pieces in their order, if each is read once, and nothing else is read of them."""
    value = EXAMPLE.get(cut)
    found = {user.args[1]: user for user in cut.users if op_name(user.target) == "getitem"}
    whole = isinstance(value, tuple | list) and found.keys() == set(range(len(value)))
    return [found[i] for i in range(len(found))] if whole and len(found) == len(cut.users) else None


def _changes_between(cut: fx.Node, cat: fx.Node) -> bool:
    """Whether a later piece may be treated in another state than the first: a value written over, gradients off."""
    node = cut.next
    while node is not cat:
        if node.op.startswith("call_") and (not node.users or op_name(node.target).endswith("_")):
            return True
        node = node.next
    return False


class _Region:
    """What is made of one piece."""

    def __init__(self, piece: fx.Node) -> None:
        self.piece = piece
        self.nodes: list[fx.Node] = []
        held = {piece}
        stack = list(piece.users)
        while stack:
            node = stack.pop()
            if node not in held and op_name(node.target) not in ("cat", "concat", "concatenate"):
                held.add(node)
                self.nodes.append(node)
                stack.extend(node.users)

    def closed(self, cat: fx.Node) -> bool:
        """Whether nothing of it is read elsewhere."""
        own = {self.piece, *self.nodes, cat}
        return all(user in own for node in (self.piece, *self.nodes) for user in node.users)

    def rowwise(self, node: fx.Node) -> bool:
        """Whether an op makes each row of what it gives of the same row of what it gets, and of no other."""
        name, rank = op_name(node.target), _rank(node)
        given = [arg for arg in node.all_input_nodes if arg not in (self.piece, *self.nodes)]
        held = [arg for arg in node.all_input_nodes if arg not in given]
        if name.endswith("_") or name == "output" or rank < 1 or any(_rank(arg) != rank for arg in held):
            return False
        first = node.args[0] if node.args else None
        if name == "dropout":
            return node.args[2:3] == (False,) or node.kwargs.get("training") is False
        if family_of(name) is Family.ELEMENTWISE and name not in RANDOM:
            return all(_rank(arg) < rank for arg in given)  # along the rows it is not read
        if name == "linear":
            return held == [first] and rank > 1
        if name == "matmul":
            return held == [first] and rank > 1 and _rank(given[0]) == 2
        if name == "layer_norm":
            shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
            return held == [first] and isinstance(shape, tuple | list) and len(shape) < rank
        if name in _NORMS:
            return held == [first]
        if name in ("softmax", "log_softmax"):
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
            return isinstance(dim, int) and dim not in (0, -rank)
        return name in ("conv1d", "conv2d", "conv3d") and held == [first] and rank == 2 + int(name[4])


def _rank(node: fx.Node) -> int:
    value = EXAMPLE.get(node)
    return value.dim() if isinstance(value, Tensor) else -1


def _same(one: Any, other: Any, first: _Region, region: _Region) -> bool:
    """Whether the second is of its piece what the first is of the first."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_same(a, b, first, region) for a, b in zip(one, other, strict=True))
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and bool(one == other)
    if one is first.piece or other is region.piece:
        return one is first.piece and other is region.piece
    if one not in first.nodes:
        return one is other
    alike = (one.op, one.target, one.kwargs.keys()) == (other.op, other.target, other.kwargs.keys())
    return alike and _same((*one.args, *one.kwargs.values()), (*other.args, *other.kwargs.values()), first, region)
