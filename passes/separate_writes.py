"""Give an in-place op on a function of parameters memory of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.errors import UnsupportedOp
from fxgrad.graph.context import Context, place_beside, source_line, spoken, without_gradients
from fxgrad.graph.edit import bind_again, flows_through, make
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE, TRACED, put_facts
from fxgrad.ops.values import memory_of
from fxgrad.ops.written import tensors_written
from fxgrad.samples.layouts import SAMPLES, Kind, Samples


def separate_writes(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every call has ``call``. After: the same; what all samples share is written once only, where it is made.

    ``u = 2 * w; u[0].mul_(3); y = linear(x, u)`` ->
    ``u = 2 * w; c = u[0].clone().mul_(3); v = u.put(places, c); y = linear(x, v)``

    A tap on ``u`` has one value to differentiate at: with an op in place, through a view as well, it would be
    another before and after. Values that hold samples stay as they are: autograd itself follows those.
    """
    memories: dict[int | None, _Memory] = {}
    stopped = without_gradients(gm.graph)
    for node in list(gm.graph.nodes):
        written, shown = tensors_written(node), dict[fx.Node, fx.Node]()
        for arg in node.all_input_nodes:
            memory = memories.get(_storage(arg))
            if memory is not None:
                shown[arg] = memory.now(arg, before=node)
                _read(node, arg, shown[arg])
        if node.op != "output" and isinstance(FAKE.of(node), Tensor):
            memories.setdefault(_storage(node), _Memory(node, gm, ctx, stopped)).see(node)
        for view in written:
            memories[_storage(view)].write(node, view, shown[view])
    return gm


def _read(node: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Let a node read another value, its call as well."""
    node.replace_input_with(old, new)
    if new is not old:
        bind_again([node])


def _storage(node: fx.Node) -> int | None:
    return memory_of(FAKE.of(node))


class _Memory:
    """What one piece of memory holds: the value that was made in it, and that with each later write put in."""

    def __init__(self, root: fx.Node, gm: fx.GraphModule, ctx: Context, stopped: set[fx.Node]) -> None:
        self.root, self.gm, self.graph, self.ctx, self.stopped = root, gm, gm.graph, ctx, stopped
        self.current = root
        self.writes: list[fx.Node] = []
        self.seen: dict[fx.Node, int] = {}  # a view, and the version that it shows
        self.views: dict[tuple[int, fx.Node, bool], fx.Node] = {}

    def see(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        piece = CALL.of(node).op == "getitem" if CALL.on(node) else False
        made = node
        if piece and isinstance(source, fx.Node) and not isinstance(FAKE.of(source), Tensor):
            made = source  # one of several views, all made at once
        self.seen[node] = sum(write < made for write in self.writes)

    def now(self, view: fx.Node, before: fx.Node) -> fx.Node:
        """Return what a view shows at this place in the graph."""
        if self.seen[view] == len(self.writes):
            return view
        if view is self.root:
            return self.current
        if any(isinstance(size, torch.SymInt) for size in _sizes(view)):
            raise _refusal(self.writes[-1], "writes into a function of parameters that is handed to all samples before")
        stops = before in self.stopped or not FAKE.of(view).requires_grad
        key = len(self.writes), view, stops
        if key not in self.views:
            with self.graph.inserting_before(before):
                value = self._make(torch.take, before, self.current, self._places(view, before))
                self.views[key] = self._make("detach", before, value) if stops else value
            TRACED.put(self.views[key], not stops)
        return self.views[key]

    def write(self, node: fx.Node, view: fx.Node, shown: fx.Node) -> None:
        """Let an in-place op work on a copy, and put that into a new value; ``shown`` is what the view shows by now."""
        shared = not any(map(self._holds_samples, self.seen))
        flows = flows_through(node)
        if not flows and self.writes:
            raise _refusal(node, "writes without gradients into a function of parameters, after one with them")
        if not CALL.of(node).inplace or shown is not node.args[0]:
            if flows and shared and any(map(flows_through, self.seen)):
                raise _refusal(node, "writes into a function of parameters, which is not its result")
            return
        if not flows or not shared or (view is self.current and self._alone(view, node)):
            return
        if self.root.op in ("placeholder", "get_attr"):  # what is written to it has to stay there
            raise _refusal(node, "writes a function of parameters into an input of the model")
        if any(isinstance(size, torch.SymInt) for size in (*_sizes(view), *_sizes(self.root))):
            raise _refusal(node, "writes into a function of parameters whose size changes")
        with self.graph.inserting_before(node):
            copy = self._make(torch.clone, node, shown)
        node.args = (copy, *node.args[1:])
        bind_again([node])
        with self.graph.inserting_before(node.next):
            if _place(view) == _place(self.root):
                self.current = node
            else:
                self.current = self._make(torch.put, node, self.current, self._places(view, node), node)
        self.writes.append(node)
        self.seen[node] = len(self.writes)

    def _holds_samples(self, node: fx.Node) -> bool:
        samples = SAMPLES.get(node)  # of a batch of one, whose sizes say nothing
        batched = isinstance(samples, Samples) and samples.kind is Kind.BATCHED
        fake = FAKE.of(node)
        own = [size for size, step in zip(fake.shape, fake.stride(), strict=True) if not _is_zero(step)]  # not expanded
        return batched or bool(self.ctx.symbols.batch_dims(own))

    def _alone(self, view: fx.Node, node: fx.Node) -> bool:
        """Return whether nothing reads this memory again but through the op's own result."""
        return all(user is node for seen in self.seen if seen is not node for user in _later(seen, node))

    def _make(self, target: Any, beside: fx.Node, *args: Any) -> fx.Node:
        return make(self.graph, self.ctx, target, args, beside=beside)

    def _places(self, view: fx.Node, like: fx.Node) -> fx.Node:
        """Return a constant: where the elements of a view are in the value that shows all of the memory."""
        if _kind(view) != _kind(self.root):
            raise UnsupportedOp(
                "a function of parameters is written over in place and seen through a view of other numbers",
                where=source_line(view),
                advice="Write with the op that returns a new tensor.",
            )
        shape, stride, offset = _place(self.root)
        whole = torch.arange(math.prod(shape))
        extent = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        memory = torch.zeros(extent, dtype=torch.long)
        memory.as_strided(shape, stride, offset).copy_(whole.view(shape))
        places = memory.as_strided(*_place(view)).clone().to(FAKE.of(self.root).device)
        name = f"places_{len(self.writes)}_{view.name}"
        self.gm.register_buffer(name, places)
        node = self.gm.graph.get_attr(name)
        put_facts(node, {FAKE: self.ctx.symbols.mode.from_tensor(places), TRACED: False})
        place_beside(like, node)
        return node


def _refusal(node: fx.Node, reason: str) -> UnsupportedOp:
    advice, call = "Use the op that returns a new tensor.", CALL.of(node)
    op = spoken(node, call.op) + "_" * call.inplace
    return UnsupportedOp(f"{op} {reason}", where=source_line(node), advice=advice)


def _is_zero(step: Any) -> bool:
    return isinstance(step, int) and step == 0


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    size, stride, offset = _place(node)
    return (*size, *stride, offset)


def _kind(view: fx.Node) -> tuple[Any, ...]:
    """Return what a view takes the bits of its memory for."""
    fake = FAKE.of(view)
    return fake.dtype, fake.is_conj(), fake.is_neg()


def _place(view: fx.Node) -> tuple[Any, Any, Any]:
    """Return where a view is in its memory."""
    fake = FAKE.of(view)
    return tuple(fake.shape), tuple(fake.stride()), fake.storage_offset()


def _later(seen: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Return the readers of a value from a node on."""
    return [user for user in seen.users if not user < node]
