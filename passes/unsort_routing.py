"""Tokens sorted by their expert, worked on in that order, and put back: leave them in the samples' own order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context
from fxgrad.graph.edit import bind_again, make
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import RANDOM, Family, family_of
from fxgrad.ops.values import memory_of, tensors_of
from fxgrad.samples.symbols import expression

_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # what a group's number survives a cast to
_CASTS = frozenset("to float int long clone contiguous _to_copy detach".split())
_BY_ROW = frozenset({"rows", "ids", "order"})
_PUTS = {"index_add": "source", "index_copy": "source", "scatter_add": "src", "index_put": "values"}
_INDEX = (torch.int32, torch.int64)  # a byte is a mask
_GROUPED = frozenset("grouped_mm _grouped_mm transformers::grouped_mm_fallback".split())


def unsort_routing(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every call has ``call``. After: no rows stand in an order that the data decides, where that was all.

    ``ids, perm = sort(ids); y = grouped_mm(x[perm], w, cumsum(histc(ids))); y[inverse(perm)]`` ->
    ``fxgrad::grouped_rows(x, w, ids)``

    What is done to sorted rows one by one may as well be done to them unsorted. So every value that the order
    reaches has to be known: rows in that order, the order itself or its inverse, or the sizes of the groups.
    One that is none of these leaves the graph as it is, for infer_samples to refuse. Rows go back through the
    inverse (``y[inverse]``), or are written to where their order says (``out.index_add_(0, perm // k, y)``).
    """
    for node in list(gm.graph.nodes):
        if _sorts(node, ctx):
            routing = _Routing(gm.graph, node, ctx)
            if routing.understood():
                routing.rewrite()
    return gm


def _sorts(node: fx.Node, ctx: Context) -> bool:
    """Whether it sorts whole numbers, one for each row of a dimension that holds samples."""
    call = CALL.get(node)
    if call is None or call.op not in ("sort", "argsort") or not isinstance(call.get("input"), fx.Node):
        return False
    fake = FAKE.of(call.get("input"))
    rows = fake.dim() == 1 and not fake.is_floating_point() and bool(ctx.symbols.batch_dims(fake.shape))
    return rows and not call.get("descending", False) and call.get("dim", -1) in (0, -1)


class _Routing:
    """One sort, and what becomes of its order.

    ``kinds`` says of each value: "order" (which row stands where), "inverse", "ids" (the sorted groups),
    "rows" (anything row by row in that order, such as the order divided), "sizes" (of the groups).
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, ctx: Context) -> None:
        self.graph, self.node, self.ctx = graph, node, ctx
        self.ids: fx.Node = CALL.of(node).get("input")
        self.size = expression(FAKE.of(self.ids).shape[0])
        self.kinds: dict[fx.Node, str] = {}
        self.returned = False  # whether rows were seen to go back
        if CALL.of(node).op == "argsort":
            self.kinds[node] = "order"

    def understood(self) -> bool:
        following = False
        for node in self.graph.nodes:
            following = following or node is self.node
            if not following or node is self.node:
                continue
            reached = [arg for arg in node.all_input_nodes if arg in self.kinds or arg is self.node]
            if not reached or (node.op != "output" and not tensors_of(FAKE.of(node))):  # sizes are sizes
                continue
            kind = None if node.op == "output" else self._kind(node)
            if kind is None:
                return False
            if kind:
                self.kinds[node] = kind
        return self.returned or "inverse" in self.kinds.values()

    def _kind(self, node: fx.Node) -> str | None:
        """What a value is that the order reaches; "" for one in the samples' own order, None for none of these."""
        call = CALL.of(node)
        kinds = {arg: self.kinds[arg] for arg in node.all_input_nodes if arg in self.kinds}
        found = set(kinds.values())
        if call.op == "getitem" and node.args[0] is self.node and self.node not in self.kinds:
            return "order" if node.args[1] == 1 else "ids"
        family = family_of(call.op)
        first: Any = node.args[0] if node.args else None
        if call.inplace and isinstance(first, fx.Node) and memory_of(FAKE.of(first)) in self._replaced():
            return None
        if family is Family.FACTORY:
            return ""
        if call.op in ("getitem", "index", "index_select"):
            return self._indexed(node, kinds)
        if call.op in _PUTS:
            back = self._inverted(node, kinds) if call.op == "index_put" else None
            return back or self._put_back(call, kinds)
        if call.op == "argsort" and found == {"order"} and len(node.args) == 1 and not node.kwargs:
            return "inverse"
        if found == {"order"} and call.op in ("floor_divide", "div") and call.get("other") == 1:
            return "order" if call.op == "floor_divide" or call.get("rounding_mode") == "floor" else "rows"
        if found == {"ids"} and call.op in _CASTS and FAKE.of(node).dtype in _EXACT:
            return "ids"
        if found == {"ids"} and call.op in ("histc", "bincount"):
            return "sizes" if self._counts(call) else None
        if found == {"sizes"}:
            exact = (call.op in _CASTS or call.op == "cumsum") and FAKE.of(node).dtype in _EXACT
            return "sizes" if exact else None
        if call.op in _GROUPED:
            return "rows" if self._grouped(call) else None
        if found <= _BY_ROW and call.op not in RANDOM:
            return "rows" if self._row_by_row(node, call, family, kinds) else None
        return None

    def _replaced(self) -> set[int | None]:
        """The memory of what has another node in its place afterwards."""
        replaced = ("ids", "order", "inverse")
        return {memory_of(FAKE.of(node)) for node, kind in self.kinds.items() if kind in replaced}

    def _counts(self, call: Any) -> bool:
        if call.op == "bincount":
            return call.get("weights") is None
        return bool(call.get("min") == 0 and call.get("max") == call.get("bins", 100) - 1)

    def _grouped(self, call: Any) -> bool:
        """grouped_mm(rows, w, offsets): as many groups as w has, their ends summed up from their sizes."""
        rows = self._argument(call, "input", "mat_a", "self")
        weight, offsets = self._argument(call, "weight", "mat_b", "mat2"), self._argument(call, "offs")
        if rows is None or weight is None or offsets is None or weight in self.kinds:
            return False
        groups, ends = FAKE.of(weight).shape[0], FAKE.of(offsets).shape
        plain = all(call.get(name) is None for name in ("bias", "out_dtype"))
        sums = [n for n in _way(offsets) if self.kinds.get(n) == "sizes" and CALL.of(n).op == "cumsum"]
        summed = self.kinds.get(offsets) == "sizes" and len(sums) == 1
        fits = FAKE.of(weight).dim() == 3 and (len(ends) == 1 and expression(ends[0]) == groups)
        return self.kinds.get(rows) == "rows" and plain and summed and fits

    def _argument(self, call: Any, *names: str) -> fx.Node | None:
        return next((call.get(name) for name in names if isinstance(call.get(name), fx.Node)), None)

    def _indexed(self, node: fx.Node, kinds: dict[fx.Node, str]) -> str | None:
        args: tuple[Any, ...] = node.args
        source = args[0]
        if CALL.of(node).op == "index_select":
            if args[1] != 0:
                return None
            index = args[2]
        else:
            index = args[1]
        several = isinstance(source, fx.Node) and not isinstance(FAKE.of(source), Tensor)
        if several:  # one of the pieces that rows were cut into
            return self.kinds.get(source)
        items = list(index) if isinstance(index, tuple | list) else [index]
        reached = [item for item in items if isinstance(item, fx.Node) and item in kinds]
        of_source, of_index = kinds.get(source), [kinds[item] for item in reached]
        if of_source in _BY_ROW and not of_index:
            whole = items and items[0] in (Ellipsis, slice(None)) and self._wide(source, items)
            return "rows" if whole else None
        if of_source == "inverse" and all(item in (Ellipsis, slice(None)) for item in items):
            return "inverse"
        rest = items[len(reached) :]
        if not reached or items[: len(reached)] != reached or any(i not in (None, Ellipsis, slice(None)) for i in rest):
            return None
        if of_source is None and all(self._places(item) for item in reached):
            ids = of_index == ["order"] and source is self.ids and not rest
            return "ids" if ids else "rows"
        return "" if of_source in ("rows", "ids") and of_index == ["inverse"] else None

    def _places(self, index: Any) -> bool:
        """Whether it names a place for each row."""
        return self.kinds.get(index) in _BY_ROW and FAKE.of(index).dtype in _INDEX

    def _wide(self, source: Any, index: Sequence[Any]) -> bool:
        """Whether an index that begins with ... leaves dimension 0 alone."""
        used = sum(item is not None and item is not Ellipsis for item in index)
        return Ellipsis not in index or used < FAKE.of(source).dim()

    def _inverted(self, node: fx.Node, kinds: dict[fx.Node, str]) -> str | None:
        """``inverse[order] = arange(S)``"""
        args: tuple[Any, ...] = node.args
        view, indices, values = args[:3]
        counts = isinstance(values, fx.Node) and CALL.of(values).op == "arange"
        if not counts or [kinds.get(index) for index in indices if index is not None] != ["order"]:
            return None
        if expression(FAKE.of(values).shape[0]) != self.size or not _starts_at_zero(values):
            return None
        self.kinds[view] = "inverse"
        if CALL.of(view).op == "getitem" and isinstance(view.args[0], fx.Node):
            self.kinds[view.args[0]] = "inverse"
        return "inverse"

    def _put_back(self, call: Any, kinds: dict[fx.Node, str]) -> str | None:
        """``out.index_add_(0, order // k, y)``: a sum does not ask for an order; what is put needs a place each."""
        base, values, index = call.get("input"), call.get(_PUTS[call.op]), call.get("index")
        if call.op == "index_put":
            index, *others = call.get("indices")
            if any(other is not None for other in others):
                return None
        adds = call.op in ("index_add", "scatter_add") or bool(call.get("accumulate"))
        if base in kinds or set(kinds) != {index, values} or kinds.get(values) not in _BY_ROW:
            return None
        lined_up = (base, values, index) if call.op == "scatter_add" else (base, values)
        ranks = {FAKE.of(arg).dim() for arg in lined_up}
        first = len(ranks) == 1 and call.get("dim", 0) in (0, -max(ranks))
        if not (first and self._places(index) and (adds or kinds[index] == "order")):
            return None
        self.returned = True
        return ""

    def _row_by_row(self, node: fx.Node, call: Any, family: Family | None, kinds: dict[fx.Node, str]) -> bool:
        outputs = tensors_of(FAKE.of(node))
        rank = max(FAKE.of(arg).dim() if isinstance(FAKE.of(arg), Tensor) else 0 for arg in kinds)
        if any(out.dim() == 0 or expression(out.shape[0]) != self.size for out in outputs):
            return False
        if family is Family.ELEMENTWISE:
            return all(self._lines_up(arg, kinds, outputs[0].dim()) for arg in node.all_input_nodes)
        first = kinds.get(call.get("input")) is not None and len(kinds) == 1
        if call.op == "linear" or (call.op in ("matmul", "mm") and outputs[0].dim() == 2):
            return first and rank == 2
        if call.op in ("expand", "expand_as", "broadcast_to", "repeat"):
            return kinds.get(call.get("input")) is not None and outputs[0].dim() == rank
        if call.op in ("view", "reshape", "view_as", "reshape_as"):
            same = outputs[0].dtype == FAKE.of(call.get("input")).dtype
            return kinds.get(call.get("input")) is not None and same
        if call.op in ("unsqueeze", "chunk", "split", "softmax", "sum", "mean"):
            dim = call.get("dim", 0)
            size = rank + (call.op == "unsqueeze")
            return first and isinstance(dim, int) and dim % size != 0
        if family is Family.NORMALISED:
            shape = call.get("normalized_shape", ())
            return first and isinstance(shape, tuple | list) and len(shape) < rank
        return False

    def _lines_up(self, arg: fx.Node, kinds: dict[fx.Node, str], rank: int) -> bool:
        """Rows on the output's dimension 0, or the same for all rows."""
        fake = FAKE.of(arg)
        if not isinstance(fake, Tensor):
            return True
        if arg in kinds:
            return fake.dim() == rank
        return fake.dim() < rank or (fake.shape[0] == 1 and isinstance(fake.shape[0], int))

    def rewrite(self) -> None:
        with self.graph.inserting_before(self.node):
            count = make(self.graph, self.ctx, torch.ops.aten.sym_size.int, (self.ids, 0), beside=self.node)
            where = {"device": FAKE.of(self.ids).device}
            order = make(self.graph, self.ctx, torch.arange, (count,), where, beside=self.node)
        for node, kind in list(self.kinds.items()):
            if CALL.of(node).op in _GROUPED:
                self._regroup(node)
            elif kind in ("order", "inverse"):
                node.replace_all_uses_with(order, delete_user_cb=self._reads)
            elif kind == "ids" and CALL.of(node).op in ("getitem", "index", "index_select"):
                node.replace_all_uses_with(self.ids)
        for node in reversed(list(dict.fromkeys([self.node, *self.kinds]))):
            if not node.users and self.kinds.get(node) != "rows":  # rows may be written to through a view
                self.graph.erase_node(node)
        bind_again(self.graph.nodes)

    def _reads(self, user: fx.Node) -> bool:
        """Whether a value of the order is an operand there, and not what is being made of it."""
        return self.kinds.get(user) not in ("order", "inverse")

    def _regroup(self, node: fx.Node) -> None:
        call = CALL.of(node)
        rows, weight = self._argument(call, "input", "mat_a", "self"), self._argument(call, "weight", "mat_b", "mat2")
        with self.graph.inserting_before(node):
            target = torch.ops.fxgrad.grouped_rows.default
            new = make(self.graph, self.ctx, target, (rows, weight, self.ids), beside=node)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        del self.kinds[node]


def _way(node: fx.Node) -> list[fx.Node]:
    """A value, and the first operands that it was made of."""
    found = [node]
    while found[-1].op in ("call_function", "call_method") and found[-1].all_input_nodes:
        found.append(found[-1].all_input_nodes[0])
    return [node for node in found if CALL.on(node)]


def _starts_at_zero(arange: fx.Node) -> bool:
    call = CALL.of(arange)
    return call.get("start", 0) in (0, None) and call.get("step", 1) in (1, None)
