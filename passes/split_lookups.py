"""Look rows of merged samples up within their sample."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context, source_line
from fxgrad.graph.edit import bind_again, make
from fxgrad.host.pytree import tree_map
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.samples.symbols import expression
from fxgrad.samples.thresholds import BATCHES

# What an index may be made by; anything else stands for data.
_FOLLOWED = frozenset(
    """arange add sub mul neg rsub to long int view reshape unsqueeze squeeze expand flatten unflatten repeat
    contiguous detach clone getitem repeat_interleave""".split()
)

_LOOKUPS = frozenset({"getitem", "index_select", "index"})
_SUMS = {"index_add": "source", "scatter_add": "src"}  # the name of what they add


def split_lookups(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: calls in normal form. After: rows of a merged dimension that an index picks for each sample stand apart.

    ``flat[arange(B) * T + i]`` -> ``flat.unflatten(0, (B, T))[arange(B), i]``, and an assertion when it runs that
    0 <= i < T: with any other i a sample would read another's row. See Note [Own rows]. Sums at such places
    (``flat.index_add(0, arange(B) * T + i, rows)``) become a ``scatter_add`` to each sample's own rows.
    """
    if ctx.mixing == "error":
        for node in list(gm.graph.nodes):
            index = _index(node, ctx)
            if index is not None and _starts_at_own_rows(index, node, ctx):
                _Split(node, index, ctx).rewrite()
    return gm


# Note [Own rows]
# ~~~~~~~~~~~~~~~
# The place of the last token of each sample, ``arange(B) * T + lengths - 1``, is its own row only where the data say
# so: a length of 0 gives the last row of the sample before. So it is not proved but asserted, on the device, in each
# step. What is proved is the rest: the passes behind follow the samples through the split rows. An index is taken for
# one of this kind where it is ``arange(B) * T`` and something equal for all samples if the data in it are equal.


def _index(node: fx.Node, ctx: Context) -> fx.Node | None:
    """The index tensor of ``flat[index]``, or of a sum at it, along dimension 0, which both hold merged samples."""
    call = CALL.get(node)
    if call is None or call.op not in _LOOKUPS | _SUMS.keys():
        return None
    if "dim" in call.arguments and call.get("dim") not in (0, -FAKE.of(node.args[0]).dim()):
        return None
    if call.get("out") is not None or call.get("alpha", 1) != 1 or (call.inplace and call.op not in _SUMS):
        return None
    given = call.get("index", call.get("indices"))
    index = given[0] if isinstance(given, tuple | list) and len(given) == 1 else given
    source = call.get("input")
    if not isinstance(index, fx.Node) or not isinstance(source, fx.Node):
        return None
    fakes = FAKE.of(source), FAKE.of(index)
    integers = all(isinstance(fake, Tensor) for fake in fakes) and fakes[1].dtype in (torch.int32, torch.int64)
    if not integers or _rows(source, ctx) in (None, 1) or _rows(index, ctx) is None:
        return None
    if call.op == "scatter_add" and not _same_shape(fakes[1], FAKE.of(call.get("src"))):  # it may name fewer places
        return None
    return index


def _same_shape(a: Tensor, b: Tensor) -> bool:
    return [*map(expression, a.shape)] == [*map(expression, b.shape)]


def _rows(node: fx.Node, ctx: Context) -> sympy.Expr | None:
    """Return how many rows of dimension 0 a sample has: T of ``[B * T, ..]``; None where B is in no such place."""
    fake = FAKE.of(node)
    if fake.dim() == 0 or ctx.symbols.batch_dims(fake.shape) != [0]:
        return None
    rows = sympy.simplify(expression(fake.shape[0]) / ctx.symbols.symbol)
    return None if ctx.symbols.symbol in rows.free_symbols else rows


def _starts_at_own_rows(index: fx.Node, node: fx.Node, ctx: Context) -> bool:
    """Return whether an index is ``arange(B) * T`` and the data of each sample."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    try:
        if CALL.of(node).op in _SUMS and torch.equal(_value(index, ctx, 2, 0), _value(index, ctx, 2, 1)):
            return False  # made of sizes alone, it needs no assertion
        return all(_fits(index, source, ctx, batch, data) for batch in BATCHES for data in (0, 1))
    except Exception:  # what an op makes of such stand-ins is no news to the user
        return False


def _fits(index: fx.Node, source: fx.Node, ctx: Context, batch: int, data: int) -> bool:
    rows = ctx.symbols.evaluate(FAKE.of(source).shape[0], batch) // batch
    places = _value(index, ctx, batch, data)
    if places.shape[0] % batch:
        return False
    rest = places.unflatten(0, (batch, -1))
    rest = rest - (torch.arange(batch) * rows).view(-1, *[1] * (rest.dim() - 1))
    return bool((rest == rest[:1]).all())


def _value(node: fx.Node, ctx: Context, batch: int, data: int) -> Any:
    """Return the value of an index at a number of samples, one number being in the place of all data."""
    fake, call = FAKE.of(node), CALL.get(node)
    if not isinstance(fake, Tensor):
        return tree_map(lambda size: ctx.symbols.evaluate(size, batch), fake)
    if call is None or call.op not in _FOLLOWED or call.inplace or not _integers(node):
        return torch.full([ctx.symbols.evaluate(size, batch) for size in fake.shape], data, dtype=fake.dtype)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda arg: _value(arg, ctx, batch, data))
    kwargs = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
    target: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return target(*args, **kwargs)


def _integers(node: fx.Node) -> bool:
    """Return whether integers are made of integers, tensors and sizes, and of no list of tensors."""
    fakes = [FAKE.of(one) for one in (node, *node.all_input_nodes)]
    return all(
        fake.dtype in (torch.int32, torch.int64) if isinstance(fake, Tensor) else isinstance(fake, int | torch.SymInt)
        for fake in fakes
    )


class _Split:
    """The rewrite of one call, with the rows of each sample apart."""

    def __init__(self, node: fx.Node, index: fx.Node, ctx: Context) -> None:
        self.node, self.index, self.ctx = node, index, ctx
        self.op = CALL.of(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        inplace = isinstance(target, str) and target.endswith("_")
        return make(self.node.graph, self.ctx, target, args, kwargs, beside=self.node, inplace=inplace)

    def rewrite(self) -> None:
        node, graph = self.node, self.node.graph
        with graph.inserting_before(node):
            result = self._added() if self.op.op in _SUMS else self._looked_up()
        TRACED.put(result, TRACED.of(node))
        node.replace_all_uses_with(result)
        bind_again(result.users)
        graph.erase_node(node)

    def _looked_up(self) -> fx.Node:
        several = _rows(self.index, self.ctx) != 1
        rows, samples, row = self._apart(several)
        result = self.call(operator.getitem, rows, (samples, row))
        return self.call(torch.flatten, result, 0, 1) if several else result

    def _added(self) -> fx.Node:
        """Write ``base.unflatten(0, (B, S)).scatter_add(1, own rows, source.unflatten(0, (B, T)))``."""
        rows, _, row = self._apart(several=True)
        source = self.call("unflatten", self.op.get(_SUMS[self.op.op]), 0, (_size(self.ctx, self.node), -1))
        for _ in range(FAKE.of(source).dim() - FAKE.of(row).dim()):
            row = self.call(torch.unsqueeze, row, -1)
        places = self.call("expand_as", self.call("long", row), source)
        result = self.call("scatter_add_" if self.op.inplace else "scatter_add", rows, 1, places, source)
        TRACED.put(result, TRACED.of(self.node))
        return self.call(torch.flatten, result, 0, 1)

    def _apart(self, several: bool) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return the rows of each sample, the samples' numbers, and the places in a sample's own rows; assert these."""
        call, n = self.call, _size(self.ctx, self.node)
        places = call("unflatten", self.index, 0, (n, -1)) if several else self.index
        rows = call("unflatten", self.op.get("input"), 0, (n, -1))
        length = FAKE.of(rows).shape[1]
        if isinstance(length, torch.SymInt):
            length = call(torch.ops.aten.sym_size.int, rows, 1)
        samples = call(torch.arange, n, device=FAKE.of(self.index).device)
        for _ in range(FAKE.of(places).dim() - 1):
            samples = call(torch.unsqueeze, samples, -1)
        row = call(torch.sub, places, call(torch.mul, samples, length))
        inside = call(torch.logical_and, call(torch.ge, row, 0), call(torch.lt, row, length))
        message = f"an index leaves the rows of its own sample, for those of another: {source_line(self.node)}"
        call(torch.ops.aten._assert_async.msg, call(torch.all, inside), message)
        return rows, samples, row


def _size(ctx: Context, node: fx.Node) -> fx.Node:
    """Return the number of samples, of an input that holds them."""
    name, dim = next(iter(ctx.sample_dims.items()))
    values = {one.name: one for one in node.graph.find_nodes(op="placeholder")}
    return make(node.graph, ctx, torch.ops.aten.sym_size.int, (values[name], dim), beside=node)
