"""What is left in memory behind an op in place: which views of it hold samples now, and where.

An op writes through one view; others show the same memory. So the memory itself is replayed on sample ids
(see `fxgrad.samples.replay`): what it held, then what was written, read again through every view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.calls import Call
from fxgrad.samples.every_batch import BATCHES, LARGEST, Batches
from fxgrad.samples.ids import read_partly, sample_ids
from fxgrad.samples.layouts import Kind, Samples
from fxgrad.samples.replay import Replay
from fxgrad.samples.symbols import Symbols, expression
from fxgrad.samples.written import declared, result_written


def written(node: fx.Node, call: Call) -> Iterator[tuple[fx.Node, Samples]]:
    """What a call writes into, and the samples that are in it then."""
    if call.op == "setitem":  # passes/lower_assignments.py left it, and nothing that matters may be in it
        return
    for place, new in result_written(node, call):
        if isinstance(new, Samples):
            yield place, new
    for place in declared(node, call):
        known = [operand.meta["samples"] for operand in node.all_input_nodes]
        several = [one for one in _flat(known) if one is not None]
        if any(one.kind in (Kind.BATCHED, Kind.MIXED) for one in several):
            yield place, Samples(Kind.MIXED, traced=any(one.traced for one in several))


def _flat(known: Any) -> Iterator[Any]:
    for one in known:
        if isinstance(one, list):
            yield from _flat(one)
        else:
            yield one


def after_write(views: Sequence[fx.Node], through: fx.Node, new: Samples, replay: Replay) -> Mapping[fx.Node, Samples]:
    """The samples of each view, the first of which shows all of the memory, after ``new`` is written through one.

    A view in which the samples have no dimension of their own is mixed from then on. Where only some of a dimension's
    rows are written so far (``out[0::2] = a``), the others have to be constants.
    """
    whole = views[0].meta["samples"]
    followed = all(samples.kind is not Kind.MIXED and not _special(samples) for samples in (whole, new))
    batches = _batches(views, _rows([(views[0], whole), (through, new)], replay.symbols), replay.symbols)
    if batches is None:
        lost = Samples(Kind.MIXED)
        return {
            view: replace(new if _same_place(view, through) else lost, traced=view.meta["samples"].traced or new.traced)
            for view in views
        }
    memories = [_Memory(views, through, new if followed else None, replay.symbols, batch) for batch in batches]
    found = {}
    for view in views:
        old: Samples = view.meta["samples"]
        traced = old.traced or new.traced
        if _same_place(view, through):
            found[view] = replace(new, traced=traced)
        elif not memories[0].touched(view):
            found[view] = old
        elif not followed:
            found[view] = Samples(Kind.MIXED, traced=traced)
        elif not memories[0].ids(view).any():
            uniform = Kind.UNIFORM in (old.kind, new.kind)
            found[view] = Samples(Kind.UNIFORM if uniform else Kind.CONSTANT, traced=traced)
        else:
            ids = [memory.ids(view) for memory in memories]
            layout = replay.read(ids, view.meta["fake"], batches=batches)
            if layout is None and Kind.UNIFORM not in (whole.kind, old.kind, new.kind):
                layout = replay.read(ids, view.meta["fake"], read_partly, batches)
            kind = Kind.MIXED if layout is None else Kind.BATCHED
            found[view] = Samples(kind, layout, traced)
    return found


# Note [Sizes of memory]
# ~~~~~~~~~~~~~~~~~~~~~~
# ``z[150:]`` shows no sample of two, and of 151 one. So memory is replayed at sizes above each number of samples that
# the place of a view counts from its beginning, or that a quotient in it has; views beyond `LARGEST` are lost.


def _rows(known: Sequence[tuple[fx.Node, Samples]], symbols: Symbols) -> int:
    """How many elements of memory one sample's rows take at the least."""
    steps = []
    for view, samples in known:
        fake, layout = view.meta["fake"], samples.layout
        if samples.kind is Kind.BATCHED and layout is not None:
            size = symbols.evaluate(fake.shape[layout.dim], BATCHES[0])
            inner = layout.inner or size // (BATCHES[0] * (layout.outer or 1))
            steps.append(inner * symbols.evaluate(fake.stride(layout.dim), BATCHES[0]))
        else:
            dims = symbols.batch_dims(fake.shape)
            steps += [symbols.evaluate(fake.stride(dim), BATCHES[0]) for dim in dims]
    return max(1, min(steps, default=1))


def _batches(views: Sequence[fx.Node], rows: int, symbols: Symbols) -> Batches | None:
    """See Note [Sizes of memory]."""
    largest = max(_counted(view.meta["fake"], rows, symbols) for view in views)
    return None if largest > LARGEST else BATCHES if largest < BATCHES[0] else (largest + 1, largest + 2)


def _counted(fake: Tensor, rows: int, symbols: Symbols) -> int:
    """The largest number of samples that a view counts from the beginning of its memory, or divides them by."""
    sizes = [*fake.shape, *fake.stride(), fake.storage_offset()]
    counted = [abs(number) for size in sizes for number in _in_functions(expression(size), symbols.symbol)]
    constant = [abs(symbols.evaluate(size, 0)) for size in sizes]
    last = [max(0, size - (not symbols.holds_batch(given))) for size, given in zip(constant, fake.shape, strict=False)]
    reach = constant[-1] + sum(place * step for place, step in zip(last, constant[fake.dim() : -1], strict=True))
    return max([int(reach) // rows, *counted])


def _in_functions(size: sympy.Expr, batch: sympy.Symbol) -> Iterator[int]:
    """What quotients, minima and maxima of the number of samples compare it with."""
    for function in sympy.preorder_traversal(size):
        if isinstance(function, sympy.Add | sympy.Mul | sympy.Pow) or batch not in function.free_symbols:
            continue
        for part in function.args:
            number = part.subs(batch, 0)
            if number.is_Integer:
                yield int(number)


def _special(samples: Samples) -> bool:
    """Packed rows, and copies whose order is not decided: no layout to make ids of."""
    return samples.kind is Kind.BATCHED and (samples.layout is None or samples.layout.rows is not None)


def _same_place(a: fx.Node, b: fx.Node) -> bool:
    one, other = a.meta["fake"], b.meta["fake"]
    return bool(
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


class _Memory:
    """Sample ids in place of the values of one piece of memory, at a number of samples."""

    def __init__(
        self, views: Sequence[fx.Node], through: fx.Node, new: Samples | None, symbols: Symbols, batch: int
    ) -> None:
        self.symbols, self.batch = symbols, batch
        size = max(self._extent(view) for view in views)
        self.content = torch.zeros(size, dtype=torch.int32)
        self.written = torch.zeros(size, dtype=torch.bool)
        self._view(self.written, through).fill_(True)
        if new is not None:
            self._put(views[0], views[0].meta["samples"])
            self._put(through, new)

    def ids(self, view: fx.Node) -> Tensor:
        return self._view(self.content, view)

    def touched(self, view: fx.Node) -> bool:
        return bool(self._view(self.written, view).any())

    def _put(self, view: fx.Node, samples: Samples) -> None:
        shown = self.ids(view)
        if samples.kind is Kind.BATCHED and samples.layout is not None:
            shown.copy_(sample_ids(samples.layout, shown.shape, self.batch))
        else:
            shown.zero_()

    def _place(self, view: fx.Node) -> tuple[list[int], list[int], int]:
        fake = view.meta["fake"]
        size, stride = ([self.symbols.evaluate(s, self.batch) for s in part] for part in (fake.shape, fake.stride()))
        return size, stride, self.symbols.evaluate(fake.storage_offset(), self.batch)

    def _extent(self, view: fx.Node) -> int:
        size, stride, offset = self._place(view)
        return offset + sum((s - 1) * step for s, step in zip(size, stride, strict=True) if s) + 1

    def _view(self, memory: Tensor, view: fx.Node) -> Tensor:
        return memory.as_strided(*self._place(view))
