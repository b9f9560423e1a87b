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
    contiguous detach clone getitem""".split()
)


def split_lookups(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: calls in normal form. After: rows of a merged dimension that an index picks for each sample stand apart.

    ``flat[arange(B) * T + i]`` -> ``flat.unflatten(0, (B, T))[arange(B), i]``, and an assertion when it runs that
    0 <= i < T: with any other i a sample would read another's row. See Note [Own rows].
    """
    if ctx.mixing == "error":
        for node in list(gm.graph.nodes):
            index = _index(node, ctx)
            if index is not None and _starts_at_own_rows(index, node, ctx):
                _split(gm.graph, node, index, ctx)
    return gm


# Note [Own rows]
# ~~~~~~~~~~~~~~~
# The place of the last token of each sample, ``arange(B) * T + lengths - 1``, is its own row only where the data say
# so: a length of 0 gives the last row of the sample before. So it is not proved but asserted, on the device, in each
# step. What is proved is the rest: the passes behind follow the samples through the split rows. An index is taken for
# one of this kind where it is ``arange(B) * T`` and something equal for all samples if the data in it are equal.


def _index(node: fx.Node, ctx: Context) -> fx.Node | None:
    """The index tensor of ``flat[index]`` along dimension 0, which both hold merged samples."""
    call = CALL.get(node)
    if call is None or call.op not in ("getitem", "index_select", "index"):
        return None
    if call.op == "index_select" and call.get("dim") not in (0, -FAKE.of(node.args[0]).dim()):
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
    return index


def _rows(node: fx.Node, ctx: Context) -> sympy.Expr | None:
    """How many rows of dimension 0 a sample has: T of ``[B * T, ..]``; None where B is in no such place."""
    fake = FAKE.of(node)
    if fake.dim() == 0 or ctx.symbols.batch_dims(fake.shape) != [0]:
        return None
    rows = sympy.simplify(expression(fake.shape[0]) / ctx.symbols.symbol)
    return None if ctx.symbols.symbol in rows.free_symbols else rows


def _starts_at_own_rows(index: fx.Node, node: fx.Node, ctx: Context) -> bool:
    """Whether an index is ``arange(B) * T`` and the data of each sample."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    try:
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
    """The value of an index at a number of samples, one number being in the place of all data."""
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
    """Whether integers are made of integers, tensors and sizes, and of no list of tensors."""
    fakes = [FAKE.of(one) for one in (node, *node.all_input_nodes)]
    return all(
        fake.dtype in (torch.int32, torch.int64) if isinstance(fake, Tensor) else isinstance(fake, int | torch.SymInt)
        for fake in fakes
    )


def _split(graph: fx.Graph, node: fx.Node, index: fx.Node, ctx: Context) -> None:
    """Write the lookup with the rows of each sample apart."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    device = FAKE.of(index).device

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return make(graph, ctx, target, args, kwargs, beside=node)

    with graph.inserting_before(node):
        several = _rows(index, ctx) != 1
        n = _size(graph, ctx, node)
        places = call("unflatten", index, 0, (n, -1)) if several else index
        rows = call("unflatten", source, 0, (n, -1))
        length = FAKE.of(rows).shape[1]
        if isinstance(length, torch.SymInt):
            length = call(torch.ops.aten.sym_size.int, rows, 1)
        samples = call(torch.arange, n, device=device)
        for _ in range(FAKE.of(places).dim() - 1):
            samples = call(torch.unsqueeze, samples, -1)
        row = call(torch.sub, places, call(torch.mul, samples, length))
        inside = call(torch.logical_and, call(torch.ge, row, 0), call(torch.lt, row, length))
        message = f"an index leaves the rows of its own sample, for those of another: {source_line(node)}"
        call(torch.ops.aten._assert_async.msg, call(torch.all, inside), message)
        result = call(operator.getitem, rows, (samples, row))
        if several:
            result = call(torch.flatten, result, 0, 1)
    TRACED.put(result, TRACED.of(node))
    node.replace_all_uses_with(result)
    bind_again(result.users)
    graph.erase_node(node)


def _size(graph: fx.Graph, ctx: Context, node: fx.Node) -> fx.Node:
    """The number of samples, of an input that holds them."""
    name, dim = next(iter(ctx.sample_dims.items()))
    values = {one.name: one for one in graph.find_nodes(op="placeholder")}
    return make(graph, ctx, torch.ops.aten.sym_size.int, (values[name], dim), beside=node)
