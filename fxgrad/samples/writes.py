"""The samples of all views of a memory after an in-place op.

An op writes through one view, and other views alias the same memory. So fxgrad replays the memory itself on sample ids
(see `fxgrad.samples.replay`): it enters the old content, applies the write, and reads each view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy
import torch
from torch import Tensor, fx

from fxgrad.host.pytree import tree_leaves
from fxgrad.ops.calls import Call
from fxgrad.ops.facts import FAKE
from fxgrad.ops.written import declared, result_written
from fxgrad.samples.ids import read_partly, sample_ids
from fxgrad.samples.layouts import SAMPLES, Kind, Samples, holds_samples, samples_of
from fxgrad.samples.replay import Replay
from fxgrad.samples.symbols import Symbols, expression
from fxgrad.samples.thresholds import BATCHES, Batches, batches_above


def written(node: fx.Node, call: Call) -> Iterator[tuple[fx.Node, Samples]]:
    """Yield each node that a call writes to, with its samples after the write."""
    if call.op == "setitem":  # infer_samples refuses one that samples or parameters reach
        return
    for place, new in result_written(call, SAMPLES.of(node)):
        if isinstance(new, Samples):
            yield place, new
    for place in declared(node, call):
        operands = tree_leaves([SAMPLES.of(operand) for operand in node.all_input_nodes])
        if holds_samples(operands):
            yield place, Samples(Kind.MIXED, traced=any(one is not None and one.traced for one in operands))


def after_write(views: Sequence[fx.Node], through: fx.Node, new: Samples, replay: Replay) -> Mapping[fx.Node, Samples]:
    """Return the samples of each view after a write of ``new`` through one; the first view covers all the memory.

    A view without a layout is mixed from then on. If only some rows of a dimension have been written
    (``out[0::2] = a``), the others have to be constants.
    """
    whole = samples_of(views[0])
    batches = _batches(views, _rows([(views[0], whole), (through, new)], replay.symbols), replay.symbols)
    followed = all(samples.kind is not Kind.MIXED and not _special(samples) for samples in (whole, new))
    memories = [_Memory(views, through, new if followed else None, replay.symbols, batch) for batch in batches or ()]

    def after(view: fx.Node) -> Samples:
        old = samples_of(view)
        traced = old.traced or new.traced
        if _same_place(view, through):
            return replace(new, traced=traced)
        if memories and not memories[0].touched(view):
            return old
        if batches is None or not followed:
            return Samples(Kind.MIXED, traced=traced)
        if not memories[0].ids(view).any():
            return Samples(Kind.UNIFORM if Kind.UNIFORM in (old.kind, new.kind) else Kind.CONSTANT, traced=traced)
        ids = [memory.ids(view) for memory in memories]
        layout = replay.read(ids, FAKE.of(view), batches=batches)
        if layout is None and Kind.UNIFORM not in (whole.kind, old.kind, new.kind):
            layout = replay.read(ids, FAKE.of(view), read_partly, batches)
        return Samples(Kind.MIXED if layout is None else Kind.BATCHED, layout, traced)

    return {view: after(view) for view in views}


# Note [Sizes of memory]
# ~~~~~~~~~~~~~~~~~~~~~~
# ``z[150:]`` contains no sample at B = 2, and one at B = 151. So fxgrad replays the memory at batch sizes above the
# offset of each view, in samples, and above each number in its quotients. Views beyond `LARGEST` are lost.


def _rows(known: Sequence[tuple[fx.Node, Samples]], symbols: Symbols) -> int:
    """Return the least number of memory elements that one sample's rows take."""
    steps = []
    for view, samples in known:
        fake, layout = FAKE.of(view), samples.layout
        if layout is not None:
            size = symbols.evaluate(fake.shape[layout.dim], BATCHES[0])
            _, inner = layout.split(size, BATCHES[0])
            steps.append(inner * symbols.evaluate(fake.stride(layout.dim), BATCHES[0]))
        else:
            dims = symbols.batch_dims(fake.shape)
            steps += [symbols.evaluate(fake.stride(dim), BATCHES[0]) for dim in dims]
    return max(1, min(steps, default=1))


def _batches(views: Sequence[fx.Node], rows: int, symbols: Symbols) -> Batches | None:
    """Return the two batch sizes of the replay, or None. See Note [Sizes of memory]."""
    return batches_above(max(_counted(FAKE.of(view), rows, symbols) for view in views))


def _counted(fake: Tensor, rows: int, symbols: Symbols) -> int:
    """Return the largest batch size that a view's offset, extent or quotients compare with."""
    sizes = [*fake.shape, *fake.stride(), fake.storage_offset()]
    counted = [abs(number) for size in sizes for number in _in_functions(expression(size), symbols.symbol)]
    constant = [abs(symbols.evaluate(size, 0)) for size in sizes]
    last = [max(0, size - (not symbols.holds_batch(full))) for size, full in zip(constant, fake.shape, strict=False)]
    reach = constant[-1] + sum(place * step for place, step in zip(last, constant[fake.dim() : -1], strict=True))
    return max([int(reach) // rows, *counted])


def _in_functions(size: sympy.Expr, batch: sympy.Symbol) -> Iterator[int]:
    """Yield the integers in quotients, minima and maxima of B."""
    for function in sympy.preorder_traversal(size):
        if isinstance(function, sympy.Add | sympy.Mul | sympy.Pow) or batch not in function.free_symbols:
            continue
        for part in function.args:
            number = part.subs(batch, 0)
            if number.is_Integer:
                yield int(number)


def _special(samples: Samples) -> bool:
    """Decide whether a batched value lacks a layout to write ids from: packed rows, or copies of undecided order."""
    return samples.kind is Kind.BATCHED and (samples.layout is None or samples.layout.rows is not None)


def _same_place(a: fx.Node, b: fx.Node) -> bool:
    first, second = ((fake.shape, fake.stride(), fake.storage_offset()) for fake in (FAKE.of(a), FAKE.of(b)))
    return bool(first == second)


class _Memory:
    """Sample ids in place of the values of one memory, at one batch size."""

    def __init__(
        self, views: Sequence[fx.Node], through: fx.Node, new: Samples | None, symbols: Symbols, batch: int
    ) -> None:
        self.symbols, self.batch = symbols, batch
        size = max(self._extent(view) for view in views)
        self.content = torch.zeros(size, dtype=torch.int32)
        self.written = torch.zeros(size, dtype=torch.bool)
        self._view(self.written, through).fill_(True)
        if new is not None:
            self._put(views[0], samples_of(views[0]))
            self._put(through, new)

    def ids(self, view: fx.Node) -> Tensor:
        return self._view(self.content, view)

    def touched(self, view: fx.Node) -> bool:
        return bool(self._view(self.written, view).any())

    def _put(self, view: fx.Node, samples: Samples) -> None:
        ids, layout = self.ids(view), samples.layout
        ids.copy_(torch.zeros(()) if layout is None else sample_ids(layout, ids.shape, self.batch))

    def _place(self, view: fx.Node) -> tuple[list[int], list[int], int]:
        fake = FAKE.of(view)
        place = [*fake.shape], [*fake.stride()], fake.storage_offset()
        return self.symbols.evaluate_all(place, self.batch)  # type: ignore[no-any-return]

    def _extent(self, view: fx.Node) -> int:
        size, stride, offset = self._place(view)
        return offset + sum((s - 1) * step for s, step in zip(size, stride, strict=True) if s) + 1

    def _view(self, memory: Tensor, view: fx.Node) -> Tensor:
        return memory.as_strided(*self._place(view))
