"""Write chains of views without merging dimensions in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxgrad.graph.context import Context, without_gradients
from fxgrad.graph.edit import bind_again, make
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.samples.symbols import expression

_REGROUPS = frozenset("view unflatten unsqueeze squeeze".split())
_VIEWS = _REGROUPS | frozenset("transpose permute t".split())  # never a copy


def simplify_views(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: calls in normal form. After: no chain of views merges a dimension that it splits again.

    ``x.view(T, 4*B, D).transpose(0, 1).view(B, 4, T, D)`` -> ``x.view(T, B, 4, D).permute(1, 2, 0, 3)``

    Where a batch whose size is a symbol is merged into another dimension, a compiler cannot simplify the
    indices, and divides for every element.
    """
    stopped = without_gradients(gm.graph)
    sources: dict[fx.Node, fx.Node] = {}  # of each view
    for node in list(gm.graph.nodes):
        source = _source(node)
        if source is not None:
            sources[node] = source
    for node in sources:
        if not any(_is_link(node, user, sources, stopped) for user in node.users):
            chain = list(_chain(node, sources, stopped))[::-1]
            if len(chain) > 2:
                _simplify(gm.graph, chain, ctx)
    return gm


def _source(node: fx.Node) -> fx.Node | None:
    """Return what a node is a view of, element by element; None for any other node."""
    call = CALL.get(node)
    if call is None or call.op not in _VIEWS or call.inplace:
        return None
    source = call.get("input")
    alike = isinstance(source, fx.Node) and FAKE.of(source).dtype == FAKE.of(node).dtype  # ``view`` takes a dtype, too
    return source if alike else None


def _is_link(source: fx.Node, view: fx.Node, sources: dict[fx.Node, fx.Node], stopped: set[fx.Node]) -> bool:
    """Return whether a view alone reads another one, and gradients flow through both or neither."""
    alone = sources.get(view) is source and len(source.users) == 1
    return alone and source in sources and (source in stopped) == (view in stopped)


def _chain(node: fx.Node, sources: dict[fx.Node, fx.Node], stopped: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield a view and the views before it that have no other reader, the last one first."""
    yield node
    while _is_link(sources[node], node, sources, stopped):
        node = sources[node]
        yield node


def _simplify(graph: fx.Graph, chain: list[fx.Node], ctx: Context) -> None:
    source, last = CALL.of(chain[0]).arguments["input"], chain[-1]
    try:
        if any(expression(size) == 1 for size in FAKE.of(source).shape):
            raise _NoAtoms
        atoms = _Atoms(FAKE.of(source).shape)
        dims = atoms.source
        for node in chain:
            dims = atoms.after(node, dims)
    except _NoAtoms:
        return
    pieces = [atoms.pieces(atom) for (atom,) in atoms.source]
    split = [piece for parts in pieces for piece in parts]
    result = [[piece for atom in dim for piece in atoms.pieces(atom)] for dim in dims]
    if any(len(dim) != 1 for dim in result):  # it merges, or has dims of size 1
        return
    inferred = [piece for parts in pieces if len(parts) > 1 for piece in parts if not atoms.sizes[piece].is_Integer]
    if len(inferred) > 1:  # a view can find one size by itself
        return
    views: list[tuple[str, list[Any]]] = [("permute", [split.index(dim[0]) for dim in result])]
    if len(split) > len(pieces):
        views.insert(0, ("view", _sizes(graph, source, pieces, atoms, chain[0], ctx)))
    value = source
    for method, args in views:
        with graph.inserting_before(last):
            value = make(graph, ctx, method, (value, *args), beside=last)
        TRACED.put(value, TRACED.of(last))
    if tuple(map(expression, FAKE.of(value).shape)) != tuple(map(expression, FAKE.of(last).shape)):
        raise AssertionError(f"{last.name}: a simplified view has another shape")
    last.replace_all_uses_with(value)
    bind_again(value.users)
    for node in reversed(chain):
        graph.erase_node(node)


def _sizes(
    graph: fx.Graph, source: fx.Node, pieces: Sequence[list[int]], atoms: _Atoms, before: fx.Node, ctx: Context
) -> list[Any]:
    """Return the arguments of the view that splits the source: numbers, sizes of the source, and at most one -1."""
    sizes: list[Any] = []
    for dim, factors in enumerate(pieces):
        for piece in factors:
            size = atoms.sizes[piece]
            if size.is_Integer:
                sizes.append(int(size))
            elif len(factors) == 1:
                with graph.inserting_before(before):
                    sizes.append(make(graph, ctx, torch.ops.aten.sym_size.int, (source, dim), beside=before))
            else:
                sizes.append(-1)
    return sizes


class _NoAtoms(Exception):
    """The sizes do not say how a view regroups its dimensions."""


class _Atoms:
    """The factors of the source's sizes that a chain of views moves about whole."""

    def __init__(self, shape: Sequence[Any]) -> None:
        self.sizes: list[sympy.Expr] = [expression(size) for size in shape]
        self.children: dict[int, tuple[int, int]] = {}
        self.source = [[dim] for dim in range(len(shape))]

    def pieces(self, atom: int) -> list[int]:
        """Return an atom, or what it was split into."""
        if atom not in self.children:
            return [atom]
        first, second = self.children[atom]
        return [*self.pieces(first), *self.pieces(second)]

    def after(self, node: fx.Node, dims: list[list[int]]) -> list[list[int]]:
        """Return the atoms of each dimension behind one view."""
        call = CALL.of(node)
        rank = len(dims)
        if call.op in _REGROUPS:
            return self._regroup(dims, [expression(size) for size in FAKE.of(node).shape])
        if call.op == "permute":
            return [dims[dim % rank] for dim in call.arguments["dims"]]
        first, second = (0, 1) if call.op == "t" else (call.arguments["dim0"] % rank, call.arguments["dim1"] % rank)
        swapped = list(dims)
        if rank > 1:
            swapped[first], swapped[second] = dims[second], dims[first]
        return swapped

    def _regroup(self, dims: list[list[int]], shape: Sequence[sympy.Expr]) -> list[list[int]]:
        left = [piece for dim in dims for atom in dim for piece in self.pieces(atom)][::-1]
        result = []
        for size in shape:
            group: list[int] = []
            rest = size
            while rest != 1:
                if not left:
                    raise _NoAtoms
                atom = left.pop()
                if not _divides(self.sizes[atom], rest):
                    left.append(self._split(atom, rest))
                    atom = self.children[atom][0]
                group.append(atom)
                rest = sympy.cancel(rest / self.sizes[atom])
            result.append(group)
        if left:
            raise _NoAtoms
        return result

    def _split(self, atom: int, size: sympy.Expr) -> int:
        """Split an atom into ``size`` and what is left, and return the latter."""
        if not _divides(size, self.sizes[atom]):
            raise _NoAtoms
        self.sizes += [size, sympy.cancel(self.sizes[atom] / size)]
        self.children[atom] = (len(self.sizes) - 2, len(self.sizes) - 1)
        return len(self.sizes) - 1


def _divides(divisor: sympy.Expr, size: sympy.Expr) -> bool:
    """Return whether ``size / divisor`` is whole whatever the symbols are."""
    quotient = sympy.cancel(size / divisor)
    if not quotient.free_symbols:
        return bool(quotient.is_Integer)
    return bool(quotient.is_polynomial()) and all(c.is_Integer for c in sympy.Poly(quotient).coeffs())
