"""Recognise tokens that are sorted by expert, worked on in that order, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context
from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import RANDOM, Family, family_of
from fxgrad.ops.forms import HANDS_OUT
from fxgrad.ops.values import memory, memory_of, tensors_of
from fxgrad.ops.written import tensors_written, writers_by_memory
from fxgrad.samples.symbols import expression

GROUPED = frozenset("grouped_mm _grouped_mm transformers::grouped_mm_fallback".split())
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # what a group's number survives a cast to
_INDEX = (torch.int32, torch.int64)  # a byte is a mask
LOOKUPS = frozenset({"getitem", "index", "index_select"})
_PUTS = {"index_add": "source", "index_copy": "source", "scatter_add": "src", "index_put": "values"}
_WHOLE: tuple[Any, ...] = (Ellipsis, slice(None))


class Order(Enum):
    """What a value is to the order that a sort found."""

    ORDER = "which row stands where"
    INVERSE = "where each row stands"
    IDS = "the sorted groups"
    ROWS = "anything row by row in that order, such as the order divided"
    SIZES = "the sizes of the groups, or their sums"
    SAMPLES = "in the samples' own order"
    UNKNOWN = "none of these"


_BY_ROW = frozenset({Order.ROWS, Order.IDS, Order.ORDER})
REPLACED = frozenset({Order.IDS, Order.ORDER, Order.INVERSE})  # values that have another node in their place afterwards


@dataclass(frozen=True)
class _Step:
    """A call that the order reaches, with the operands by which it does."""

    node: fx.Node
    call: Call
    kinds: dict[fx.Node, Order]

    def only(self, kind: Order) -> bool:
        return set(self.kinds.values()) == {kind}

    @property
    def exact(self) -> bool:
        return FAKE.of(self.node).dtype in _EXACT

    @property
    def on_first(self) -> bool:
        """Return whether the order reaches the first operand, and no other."""
        return self.kinds.keys() == {self.call.get("input")}

    @property
    def rank(self) -> int:
        return max(FAKE.of(arg).dim() if isinstance(FAKE.of(arg), Tensor) else 0 for arg in self.kinds)


def sorts(node: fx.Node, ctx: Context) -> bool:
    """Return whether a call sorts whole numbers, one for each row of a dimension that holds samples."""
    call = CALL.get(node)
    if call is None or call.op not in ("sort", "argsort") or not isinstance(call.get("input"), fx.Node):
        return False
    fake = FAKE.of(call.get("input"))
    rows = fake.dim() == 1 and not fake.is_floating_point() and bool(ctx.symbols.batch_dims(fake.shape))
    return rows and call.get("dim", -1) in (0, -1) and call.get("out") is None


class Routing:
    """One sort, and what each value is that its order reaches."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.ids: fx.Node = CALL.of(node).get("input")
        self.size = expression(FAKE.of(self.ids).shape[0])
        self.kinds: dict[fx.Node, Order] = {node: Order.ORDER} if CALL.of(node).op == "argsort" else {}
        self.returned = False  # whether rows were seen to go back
        self.writers = writers_by_memory(node.graph)

    def understood(self) -> bool:
        """Follow the order; return whether every value that it reaches is known, and rows go back."""
        if any(self.node < writer for writer in self.writers[memory(self.ids)]):
            return False  # the unsorted ids have the place of the sorted ones afterwards
        for node in self.node.graph.nodes:
            reached = self.node < node and any(arg in self.kinds or arg is self.node for arg in node.all_input_nodes)
            if not reached or (node.op != "output" and not tensors_of(FAKE.of(node))):  # sizes are sizes
                continue
            kind = Order.UNKNOWN if node.op == "output" else self._kind(node)
            if kind is Order.UNKNOWN:
                return False
            if kind is not Order.SAMPLES:
                self.kinds[node] = kind
        return self.returned or Order.INVERSE in self.kinds.values()

    def _kind(self, node: fx.Node) -> Order:
        call = CALL.of(node)
        step = _Step(node, call, {arg: self.kinds[arg] for arg in node.all_input_nodes if arg in self.kinds})
        if any(memory(place) in self._replaced() for place in tensors_written(node)):
            return Order.UNKNOWN
        if family_of(call.op) is Family.FACTORY:
            return Order.SAMPLES
        return _TRANSITIONS.get(call.op, Routing._row_by_row)(self, step)

    def _replaced(self) -> set[int | None]:
        return {memory(node) for node, kind in self.kinds.items() if kind in REPLACED}

    def _sorted_again(self, step: _Step) -> Order:
        plain = len(step.node.args) == 1 and not step.node.kwargs
        return Order.INVERSE if step.only(Order.ORDER) and plain else Order.UNKNOWN

    def _divided(self, step: _Step) -> Order:
        floor = step.call.op == "floor_divide" or step.call.get("rounding_mode") == "floor"
        if step.only(Order.ORDER) and step.call.get("other") == 1 and floor:
            return Order.ORDER
        return self._row_by_row(step)

    def _cast(self, step: _Step) -> Order:
        for kind in (Order.IDS, Order.SIZES):
            if step.only(kind) and step.exact:
                return kind
        return self._row_by_row(step)

    def _counted(self, step: _Step) -> Order:
        call = step.call
        if call.op == "bincount":
            counts = call.get("weights") is None
        else:
            counts = call.get("min") == 0 and call.get("max") == call.get("bins", 100) - 1
        ascending = not CALL.of(self.node).get("descending", False)  # as the groups stand in what is counted
        return Order.SIZES if step.only(Order.IDS) and counts and ascending else Order.UNKNOWN

    def _summed(self, step: _Step) -> Order:
        return Order.SIZES if step.only(Order.SIZES) and step.exact else Order.UNKNOWN

    def _grouped(self, step: _Step) -> Order:
        """grouped_mm(rows, w, offsets): as many groups as w has, their ends summed up from their sizes."""
        rows, weight, offsets = grouped_operands(step.call)
        if rows is None or weight is None or offsets is None or weight in self.kinds:
            return Order.UNKNOWN
        groups, ends = FAKE.of(weight).shape[0], FAKE.of(offsets).shape
        plain = all(step.call.get(name) is None for name in ("bias", "out_dtype"))
        sums = [n for n in _way(offsets) if self.kinds.get(n) is Order.SIZES and CALL.of(n).op == "cumsum"]
        summed = self.kinds.get(offsets) is Order.SIZES and len(sums) == 1
        fits = FAKE.of(weight).dim() == 3 and (len(ends) == 1 and expression(ends[0]) == groups)
        return Order.ROWS if self.kinds.get(rows) is Order.ROWS and plain and summed and fits else Order.UNKNOWN

    def _looked_up(self, step: _Step) -> Order:
        source, index = step.call.get("input"), step.call.get("index", step.call.get("indices"))
        if source is self.node and source not in self.kinds:  # (values, indices) of sort
            return Order.ORDER if index == 1 else Order.IDS
        if isinstance(source, fx.Node) and not isinstance(FAKE.of(source), Tensor):  # rows that were cut into pieces
            kind = self.kinds.get(source, Order.UNKNOWN)
            return Order.UNKNOWN if kind is Order.INVERSE and index != 1 else kind  # (values, indices) of the order
        if step.call.op == "index_select" and step.call.get("dim") != 0:
            return Order.UNKNOWN
        items = list(index) if isinstance(index, tuple | list) else [index]
        reached = [item for item in items if isinstance(item, fx.Node) and item in step.kinds]
        of_source, of_index = step.kinds.get(source), [step.kinds[item] for item in reached]
        if of_source in _BY_ROW and not reached:
            return Order.ROWS if items and items[0] in _WHOLE and _leaves_rows(source, items) else Order.UNKNOWN
        if of_source is Order.INVERSE and all(item in _WHOLE for item in items):
            return Order.INVERSE
        rest = items[len(reached) :]
        first = items[: len(reached)] == reached and all(item is None or item in _WHOLE for item in rest)
        if not reached or not first:
            return Order.UNKNOWN
        if of_source is None and all(map(self._places, reached)):
            ids = of_index == [Order.ORDER] and source is self.ids and not rest
            return Order.IDS if ids else Order.ROWS
        back = of_source in (Order.ROWS, Order.IDS) and of_index == [Order.INVERSE]
        return Order.SAMPLES if back else Order.UNKNOWN

    def _places(self, index: Any) -> bool:
        """Return whether it names a place for each row."""
        return self.kinds.get(index) in _BY_ROW and FAKE.of(index).dtype in _INDEX

    def _put(self, step: _Step) -> Order:
        """``out.index_add_(0, order // k, y)``: a sum does not ask for an order; what is put needs a place each."""
        call = step.call
        if call.op == "index_put" and self._inverts(step):
            return Order.INVERSE
        base, values, index = call.get("input"), call.get(_PUTS[call.op]), call.get("index")
        if call.op == "index_put":
            index, *others = call.get("indices")
            if any(other is not None for other in others):
                return Order.UNKNOWN
        adds = call.op in ("index_add", "scatter_add") or bool(call.get("accumulate"))
        if base in step.kinds or step.kinds.keys() != {index, values} or step.kinds.get(values) not in _BY_ROW:
            return Order.UNKNOWN
        lined_up = (base, values, index) if call.op == "scatter_add" else (base, values)
        ranks = {FAKE.of(arg).dim() for arg in lined_up}
        first = len(ranks) == 1 and call.get("dim", 0) in (0, -max(ranks))
        if not (first and self._places(index) and (adds or step.kinds[index] is Order.ORDER)):
            return Order.UNKNOWN
        self.returned = True
        return Order.SAMPLES

    def _inverts(self, step: _Step) -> bool:
        """``inverse[order] = arange(S)``, of which the tensor that is written to is the inverse as well."""
        view, values, indices = (step.call.get(name) for name in ("input", "values", "indices"))
        if [step.kinds.get(index) for index in indices] != [Order.ORDER] or step.call.get("accumulate"):
            return False
        if not isinstance(values, fx.Node) or CALL.get(values) is None or CALL.of(values).op != "arange":
            return False
        written = bool(self.writers[memory(values)])
        sizes = [[expression(size) for size in FAKE.of(one).shape] for one in (view, values)]
        if written or sizes != [[self.size]] * 2 or not _starts_at_zero(values) or FAKE.of(view).dtype not in _INDEX:
            return False
        names = _names(view, step.node) if step.call.inplace else []
        if names and not _is_new(names, view, step.node):
            return False
        self.kinds |= dict.fromkeys(names, Order.INVERSE)
        return True

    def _row_by_row(self, step: _Step) -> Order:
        outputs, op = tensors_of(FAKE.of(step.node)), step.call.op
        whole = all(out.dim() > 0 and expression(out.shape[0]) == self.size for out in outputs)
        rowwise = _ROWWISE.get(op) or _OF_FAMILY.get(family_of(op))  # type: ignore[arg-type]
        if not whole or op in RANDOM or not set(step.kinds.values()) <= _BY_ROW or rowwise is None:
            return Order.UNKNOWN
        return Order.ROWS if rowwise(step, outputs[0]) else Order.UNKNOWN


_TRANSITIONS: dict[str, Callable[[Routing, _Step], Order]] = {
    **dict.fromkeys(LOOKUPS, Routing._looked_up),
    **dict.fromkeys(_PUTS, Routing._put),
    **dict.fromkeys("to float int long clone contiguous _to_copy detach".split(), Routing._cast),
    **dict.fromkeys(("floor_divide", "div"), Routing._divided),
    **dict.fromkeys(("histc", "bincount"), Routing._counted),
    **dict.fromkeys(GROUPED, Routing._grouped),
    **dict.fromkeys(("argsort", "sort"), Routing._sorted_again),
    "cumsum": Routing._summed,
}
"""What becomes of the order in each op; every other op has to work row by row."""


def _multiplies(step: _Step, out: Tensor) -> bool:
    return step.on_first and step.rank == 2 and (step.call.op == "linear" or out.dim() == 2)


def _copies(step: _Step, out: Tensor) -> bool:
    return step.call.get("input") in step.kinds and out.dim() == step.rank


def _reshapes(step: _Step, out: Tensor) -> bool:
    source = step.call.get("input")
    return source in step.kinds and bool(out.dtype == FAKE.of(source).dtype)


def _works_along(step: _Step, out: Tensor) -> bool:
    dim = step.call.get("dim", 0)
    return step.on_first and isinstance(dim, int) and dim % (step.rank + (step.call.op == "unsqueeze")) != 0


def _normalises(step: _Step, out: Tensor) -> bool:
    shape = step.call.get("normalized_shape", ())
    return step.on_first and isinstance(shape, tuple | list) and len(shape) < step.rank


def _lines_up(step: _Step, out: Tensor) -> bool:
    """Return whether each operand has its rows on the output's dimension 0, or is the same for all rows."""
    operands = {arg: FAKE.of(arg) for arg in step.node.all_input_nodes if isinstance(FAKE.of(arg), Tensor)}
    return all(
        fake.dim() == out.dim()
        if arg in step.kinds
        else fake.dim() < out.dim() or (isinstance(fake.shape[0], int) and fake.shape[0] == 1)
        for arg, fake in operands.items()
    )


_ROWWISE: dict[str, Callable[[_Step, Tensor], bool]] = {
    **dict.fromkeys(("linear", "matmul", "mm"), _multiplies),
    **dict.fromkeys(HANDS_OUT, _copies),
    **dict.fromkeys(("view", "reshape", "view_as", "reshape_as"), _reshapes),
    **dict.fromkeys(("unsqueeze", "chunk", "split", "softmax", "sum", "mean"), _works_along),
}
_OF_FAMILY = {Family.ELEMENTWISE: _lines_up, Family.NORMALISED: _normalises}


def grouped_operands(call: Call) -> list[fx.Node | None]:
    """Return the rows, the weight and the offsets of a grouped product, however they are called."""
    spellings = (("input", "mat_a", "self"), ("weight", "mat_b", "mat2"), ("offs",))
    return [
        next((call.get(name) for name in names if isinstance(call.get(name), fx.Node)), None) for names in spellings
    ]


def _leaves_rows(source: Any, index: Sequence[Any]) -> bool:
    """Return whether an index that begins with ... leaves dimension 0 alone."""
    used = sum(item is not None and item is not Ellipsis for item in index)
    return Ellipsis not in index or used < FAKE.of(source).dim()


def _way(node: fx.Node) -> list[fx.Node]:
    """Return a value, and the first operands that it was made of."""
    way = [node]
    while way[-1].op in ("call_function", "call_method") and way[-1].all_input_nodes:
        way.append(way[-1].all_input_nodes[0])
    return [node for node in way if CALL.on(node)]


def _names(view: fx.Node, until: fx.Node) -> list[fx.Node]:
    """Return the values before a node that lie in the memory of one of them."""
    memory = memory_of(FAKE.of(view))
    return [node for node in view.graph.nodes if node < until and memory_of(FAKE.get(node)) == memory]


def _is_new(names: Sequence[fx.Node], view: fx.Node, put: fx.Node) -> bool:
    """Whether nothing reads a tensor, or has another name for it, before values are put into it through a view."""
    base = names[0]
    whole = view is base or (view.args[:1] == (base,) and CALL.of(view).op == "getitem")
    unread = all(user is put or user is view or put < user for name in names for user in name.users)
    return base.op.startswith("call_") and whole and set(names) == {base, view} and unread


def _starts_at_zero(arange: fx.Node) -> bool:
    call = CALL.of(arange)
    return call.get("start", 0) in (0, None) and call.get("step", 1) in (1, None)
