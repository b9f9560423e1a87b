"""Put a tap behind every op that uses a parameter, and one Collect before all of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.errors import UncoveredParameter, UnsupportedOp
from fxgrad.graph.context import Context, path_to, place_beside, source_line
from fxgrad.graph.edit import add_placeholders, bind_again, make, open_tape
from fxgrad.graph.recording import Recorder
from fxgrad.ops.calls import CALL, Call, map_nodes
from fxgrad.ops.facts import FAKE, TRACED, put_facts
from fxgrad.ops.families import Family, family_of
from fxgrad.ops.forms import HANDS_OUT
from fxgrad.ops.user_functions import UserFunction
from fxgrad.ops.values import memory
from fxgrad.ops.written import dirty, places_of_result, tensors_written
from fxgrad.rules import OWN_BACKWARDS
from fxgrad.rules.lookup import reads_by_lists, reads_by_tensors
from fxgrad.rules.strategies import choose, choose_own, choose_several
from fxgrad.rules.uses import USE, Slot, Use
from fxgrad.runtime.targets import DeriveTarget, OwnTapTarget, TapSeveralTarget, TapTarget
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples, layout_of, samples_of, samples_of_outputs, taken_from


def attach_taps(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every value has ``samples``. After: no gradient reaches a parameter but through a tap.

    ``y = linear(x, w)`` -> ``y = linear(x, w.detach()); y = tap_linear(tape, n, y, handle, x)``, with
    ``handle = collect(tape, n, *placeholders)`` in front, the gradient placeholders being new inputs ``[B, *w.shape]``.
    """
    if ctx.parameters:
        nodes = list(gm.graph.nodes)
        attachment = _Attachment(gm.graph, ctx)
        for node in nodes:
            if node.op in ("call_function", "call_method"):
                attachment.visit(node)
    return gm


class _Attachment:
    def __init__(self, graph: fx.Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        self.recorder = Recorder(graph, ctx)
        self.keys, self.copied, self.replaced = self.recorder.keys, self.recorder.copied, self.recorder.replaced
        self.handles: dict[int, fx.Node] = {}
        self._open()

    def _open(self) -> None:
        """gradient placeholders, n, tape, handle and the native values of the parameters."""
        placeholders, given = add_placeholders(self.graph, self.ctx)
        cursor = (placeholders + given)[-1]
        for key, node in enumerate(self.ctx.trainable(self.graph)):
            with self.graph.inserting_after(cursor):
                cursor = self.graph.call_method("detach", (node,))
            put_facts(cursor, {FAKE: FAKE.of(node), SAMPLES: SAMPLES.of(node), TRACED: True})
            node.replace_all_uses_with(cursor, delete_user_cb=partial(is_not, cursor))
            self.replaced[node] = cursor
            self.keys[cursor] = key
        if self.ctx.single:
            self.n: Any = 1
        else:
            batched, dim = next(iter(self.ctx.sample_dims.items()))
            size = (self.recorder.values[batched], dim)
            with self.graph.inserting_after(cursor):
                self.n = cursor = self.graph.call_function(torch.ops.aten.sym_size.int, size)
        self.tape, handle = open_tape(self.graph, self.ctx, cursor, self.n, placeholders, given)
        self.handles = dict.fromkeys(self.keys.values(), handle)

    def visit(self, node: fx.Node) -> None:
        samples = SAMPLES.get(node)
        call: Call = CALL.of(node)
        self._check_written(node, call)
        if call.op in OWN_BACKWARDS and isinstance(samples, list) and self._tap_own(node, samples):
            return None
        if isinstance(samples, list):
            return self._check_several(node, call, samples)
        if not isinstance(samples, Samples) or not TRACED.of(node):
            return None
        source, select = taken_from(node) or (node, None)  # ``w.chunk(3)[1]`` is one function of w
        used = [arg for arg in source.all_input_nodes if self.copied.get(arg, arg) in self.keys]
        if not used or isinstance(source.target, OwnTapTarget | TapSeveralTarget):
            return None
        if samples.kind is Kind.UNIFORM:
            return self._derive(node, source, select)
        if samples.kind is Kind.BATCHED:
            if call.op in HANDS_OUT and used == [node.args[0]] and not self._is_written(node):
                self._see_through(node, samples)
                if not node.users:
                    return self.graph.erase_node(node)
                self._split(node)
            return self._tap(node, samples.layout)
        raise self._uncovered(node)

    def _uncovered(self, node: fx.Node) -> UncoveredParameter:
        return UncoveredParameter(
            f"{CALL.of(node).op} brings a parameter into a value that mixes samples",
            where=source_line(node),
            path=path_to(node, self.ctx),
            advice="Add penalties on parameters outside of the model.",
        )

    def _check_written(self, node: fx.Node, call: Call) -> None:
        """A tap stands behind a result: what else an op writes parameters into would be read past it."""
        # of an op in place, the first argument stands for the place of the result by now
        result: list[Any] = [places_of_result(call), node.args[0]] if call.inplace else dirty(node)
        places = [place for place in tensors_written(node) if place not in result]
        used = any(arg in self.keys for arg in node.all_input_nodes)
        if used and any(FAKE.of(place).requires_grad for place in places):
            raise UnsupportedOp(
                f"{call.op}{'_' * call.inplace} writes a parameter's values into tensors that are not its result",
                where=source_line(node),
                path=path_to(node, self.ctx),
                advice="Use an op that returns a new tensor.",
            )

    def _check_several(self, node: fx.Node, call: Call, samples: list[Samples | None]) -> None:
        """Ops with several outputs: functions of parameters are followed from their getitem on."""
        used = [arg for arg in node.all_input_nodes if arg in self.keys]
        traced = [s for s in samples if s is not None and s.traced]
        if used and traced and all(s.kind is Kind.BATCHED for s in traced):
            return self._tap_several(node, samples)
        kinds = {s.kind for s in traced}
        if used and Kind.BATCHED in kinds and Kind.MIXED not in kinds:
            raise UnsupportedOp(
                f"one of the values that {call.op.rpartition('.')[2]} returns depends on parameters alone, "
                "and another on samples",
                where=source_line(node),
                path=path_to(node, self.ctx),
                advice="Compute what depends on parameters alone outside of it.",
            )
        if used and kinds - {Kind.UNIFORM}:
            raise UnsupportedOp(
                f"{call.op} returns several values that depend on a parameter and on samples",
                where=source_line(node),
                path=path_to(node, self.ctx),
                advice="Write it in terms of ops that return one tensor.",
            )

    def _handles_of(self, use: Use) -> list[fx.Node]:
        return list(dict.fromkeys(self.handles[key] for key in use.wrt.values()))

    def _tap(self, node: fx.Node, layout: Layout | None) -> None:
        use, operands = self.recorder.use(node, layout)
        strategy = choose(use, CALL.of(node), _shapes(operands), where=source_line(node))
        if samples_of(node).met and strategy.name == "generic":  # it calls the op on one sample alone
            raise self._uncovered(node)
        rest = self.recorder.saved(node, operands, strategy)
        handles = self._handles_of(use)
        target = TapTarget(strategy, len(handles))
        with self.graph.inserting_after(node):
            tap = self.graph.call_function(target, (self.tape, self.n, node, *handles, *rest))
        put_facts(tap, {FAKE: FAKE.of(node), SAMPLES: SAMPLES.of(node), USE: use})
        place_beside(node, tap)
        node.replace_all_uses_with(tap, delete_user_cb=partial(is_not, tap))
        self.replaced[node] = tap

    def _tap_own(self, node: fx.Node, samples: list[Samples | None]) -> bool:
        """Make an op that has a backward of fxgrad's own its tap, where it uses parameters on samples."""
        known = samples[0]
        used = any(arg in self.keys for arg in node.all_input_nodes)
        if not used or known is None or known.kind is not Kind.BATCHED:
            return False
        use, operands = self.recorder.use(node, known.layout)
        strategy = choose_own(use, single=self.ctx.single, where=source_line(node))
        handles = self._handles_of(use)
        node.target, node.kwargs = OwnTapTarget(strategy, len(handles)), {}
        node.args = (self.tape, self.n, *handles, *operands)
        USE.put(node, use)
        return True

    def _tap_several(self, node: fx.Node, samples: list[Samples | None]) -> None:
        several = {i: s.layout for i, s in enumerate(samples) if s is not None and s.traced and s.layout is not None}
        use, operands = self.recorder.use(node, next(iter(several.values())))
        use = replace(use, several=tuple(several.items()))
        strategy = choose_several(use, CALL.of(node), where=source_line(node))
        handles = self._handles_of(use)
        rest = self.recorder.saved(node, operands, strategy)
        readers = [user for user in node.users if user.args[:1] == (node,)]
        with self.graph.inserting_after(node):
            tap = self.graph.call_function(TapSeveralTarget(strategy, len(handles)))
        ys = [self._output(node, i, tap) for i in several]
        tap.args = (self.tape, self.n, *ys, *handles, *rest)
        put_facts(tap, {USE: use, FAKE: tuple(map(FAKE.of, ys)), SAMPLES: list(map(SAMPLES.of, ys))})
        place_beside(node, tap)
        for reader in readers:
            if reader.args[1] in several:
                reader.args = (tap, list(several).index(reader.args[1]))  # type: ignore[arg-type]

    def _output(self, node: fx.Node, i: int, before: fx.Node) -> fx.Node:
        with self.graph.inserting_before(before):
            y = self.graph.call_function(operator.getitem, (node, i))
        put_facts(y, {FAKE: FAKE.of(node)[i], SAMPLES: samples_of_outputs(node)[i], TRACED: TRACED.of(node)[i]})
        return y

    def _see_through(self, node: fx.Node, samples: Samples) -> None:
        """Let what reads copies of a parameter be a use of the one: autograd would add up what they give it.

        ``w.expand(B, 7, 3).gather(1, ids)`` is, for each sample, ``w.expand(1, 7, 3).gather(1, ids)``.
        """
        readers = [user for user in node.users if self._reads_copies(user, node)]
        layout, fake = samples.layout, FAKE.of(node)
        if not readers or layout is None or layout.merged:
            return
        repeats = CALL.of(node).op == "repeat"
        sizes = list(_flat(node.args[1:]) if repeats else fake.shape)
        sizes[layout.dim] = 1
        if not all(isinstance(size, int) for size in sizes):  # another one that changes from call to call
            return
        with self.graph.inserting_before(node):
            one = make(self.graph, self.ctx, "repeat" if repeats else "expand", (node.args[0], *sizes), beside=node)
            if FAKE.of(one).shape[layout.dim] != 1:
                return self.graph.erase_node(one)
            copies = self.graph.node_copy(node)
        SAMPLES.put(one, Samples(Kind.UNIFORM, traced=True))
        copies.meta.update(node.meta)
        put_facts(copies, {TRACED: False, SAMPLES: Samples(Kind.BATCHED, layout)})
        self._derive(one, one, None)
        self.copied[copies] = one
        for reader in readers:
            reader.replace_input_with(node, copies)
        bind_again([copies, *readers])

    def _is_written(self, copies: fx.Node) -> bool:
        """Return whether copies made later would be others: they are written to, or the one is after them."""
        own, source = (self.recorder.writers[memory(node)] for node in (copies, copies.args[0]))
        return bool(own) or any(writer > copies for writer in source)

    def _split(self, node: fx.Node) -> None:
        """Give each reader copies of its own, and so a tap: what several give to one, autograd would add up."""
        for reader in sorted(node.users)[1:]:
            with self.graph.inserting_before(reader):
                copies = self.graph.node_copy(node)
            copies.meta.update(node.meta)
            reader.replace_input_with(node, copies)
            bind_again([copies, reader])
            self._tap(copies, layout_of(node))

    def _reads_copies(self, reader: fx.Node, copies: fx.Node) -> bool:
        call: Call | None = CALL.get(reader)
        samples = SAMPLES.get(reader)
        if call is None or call.inplace or not isinstance(samples, Samples) or samples.kind is not Kind.BATCHED:
            return False
        if call.op in _PRODUCTS or family_of(call.op) is Family.ELEMENTWISE:
            return True
        read = call.op in _READS and call.get("input") is copies
        if call.op in ("getitem", "index"):
            index = map_nodes(call.get("index", call.get("indices")), _as_slot)
            read = read and (reads_by_tensors(index) or reads_by_lists(index))
        return read

    def _derive(self, node: fx.Node, source: fx.Node, select: int | None) -> None:
        self._check_function(source)
        use, operands = self.recorder.use(source, None, select)
        strategy = choose(use, CALL.of(source), _shapes(operands), where=source_line(node))
        rest = self.recorder.saved(source, operands, strategy)
        handles, key = self._handles_of(use), len(self.handles)
        with self.graph.inserting_after(node):
            target = DeriveTarget(strategy, key, len(handles))
            self.handles[key] = self.graph.call_function(target, (self.tape, self.n, *handles, *rest))
        USE.put(self.handles[key], use)
        self.keys[node] = key
        if use.inplace and isinstance(node.args[0], fx.Node):
            self.keys[node.args[0]] = key

    def _check_function(self, source: fx.Node) -> None:
        """The gradients of a function's outputs come back one by one: their sum is right of a linear backward."""
        function = source.target
        if not isinstance(function, UserFunction) or not isinstance(FAKE.of(source), tuple | list):
            return
        if len({user.args[1] for user in source.users if user.users}) > 1 and not function.linear:
            raise UnsupportedOp(
                f"{function.what} of parameters alone returns several values, and its backward is not seen to be "
                "linear in their gradients",
                where=source_line(source),
                path=path_to(source, self.ctx),
                advice="Return one value, such as torch.cat of them, or write the backward as sums of products with "
                "what was saved.",
            )


_PRODUCTS = frozenset({"matmul", "rmatmul", "bmm", "baddbmm", "einsum", "tensordot"})
_READS = frozenset({"gather", "take_along_dim", "index_select", "getitem", "index"})


def _flat(args: Sequence[Any]) -> Sequence[Any]:
    """Sizes that stand in a call one by one, or in a list."""
    return args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args


def _as_slot(node: fx.Node) -> Any:
    """Return a tensor in an index; another value is none that a rule takes."""
    fake = FAKE.of(node)
    integers = isinstance(fake, Tensor) and not fake.dtype.is_floating_point and fake.dtype != torch.bool
    return Slot(0) if integers else ...


def _shapes(operands: Sequence[fx.Node]) -> list[Any]:
    return [FAKE.of(arg).shape if isinstance(FAKE.of(arg), Tensor) else None for arg in operands]
