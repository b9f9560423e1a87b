"""Copies of a parameter's value in an order that is not decided yet.

``w.expand(h.shape[0], -1)`` for ``h`` of ``[B * T, C]`` gives each row a copy. They fit any order of the samples until
they meet values that hold samples; from then on, they have the order of these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import MOVEMENT, Family
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples, layout_of
from fxgrad.samples.operands import Op, by_shape
from fxgrad.samples.symbols import Symbols, expression

UNDECIDED = Samples(Kind.BATCHED, None, traced=True)


class LostCopies(Exception):
    """Raised for a node that gives copies to the samples in an order that cannot be followed."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


def is_undecided(samples: Any) -> bool:
    return isinstance(samples, Samples) and samples.kind is Kind.BATCHED and samples.layout is None


def copied(op: Op, output: Tensor) -> Samples:
    """Return the samples of an output with sample dims, from operands that hold none."""
    layout = by_shape(op.promoted, output)
    if isinstance(layout, Layout):
        return Samples(Kind.BATCHED, layout, traced=True)
    dims = op.symbols.batch_dims(output.shape)
    if len(dims) == 1 and op.call.op in MOVEMENT:
        copies = op.replay.copies(op.node, output, dims[0])
        if copies is not None:
            return Samples(Kind.BATCHED, copies, traced=True)
        if op.call.op in ("expand", "expand_as", "broadcast_to"):
            return UNDECIDED
    if len(dims) == 1 and (op.family is Family.ELEMENTWISE or _looked_up(op, dims[0])):
        return UNDECIDED  # every row has a copy of its own, as it had above
    raise LostCopies(op.node)


def _looked_up(op: Op, dim: int) -> bool:
    """Decide whether an op looks up a parameter by ids without samples: ``embedding(ids.expand(B * C, T), w)``."""
    ids = op.operand("input")
    if op.family is not Family.LOOKUP or ids is None or op.call.get("max_norm") is not None:
        return False
    return op.symbols.batch_dims(ids.fake.shape) == [dim]  # and none is in the table


def decide(op: Op) -> bool:
    """Give undecided operands the order of the samples that they meet; return whether there were any."""
    undecided = [operand for operand in op.operands if is_undecided(operand.samples)]
    merges = op.merges()
    for operand in undecided:
        (dim,) = op.symbols.batch_dims(operand.fake.shape)
        merge = merges.get(expression(operand.fake.shape[dim]))
        if merge is not None:
            _settle(operand.node, merge, op.symbols)
        elif op.call.op not in MOVEMENT and op.family is not Family.ELEMENTWISE:
            raise LostCopies(operand.node)
    return bool(undecided)


def moved(op: Op) -> Samples:
    """Return the samples of undecided copies after an op that leaves their dim whole and in its order."""
    (output,), symbols = op.outputs, op.symbols
    values = [operand.fake for operand in op.operands]
    sizes = {expression(fake.shape[dim]) for fake in values for dim in symbols.batch_dims(fake.shape)}
    dims = symbols.batch_dims(output.shape) if isinstance(output, Tensor) else []
    whole = len(dims) == len(sizes) == 1 and expression(output.shape[dims[0]]) in sizes
    elementwise = op.family is Family.ELEMENTWISE
    if whole and (elementwise or (len(values) == 1 and op.replay.keeps_rows(op.node, op.operands[0].node))):
        return UNDECIDED
    raise LostCopies(op.node)


def _settle(node: fx.Node, merge: Layout, symbols: Symbols) -> None:
    """Give copies their order, and the copies that they were made of."""
    (dim,) = symbols.batch_dims(FAKE.of(node).shape)
    SAMPLES.put(node, Samples(Kind.BATCHED, merge.at(dim), traced=True))
    for source in node.all_input_nodes:
        layout = layout_of(source)
        if is_undecided(SAMPLES.of(source)):
            _settle(source, merge, symbols)
        elif layout is not None and layout.at(0) != merge.at(0):  # other copies of it met another order
            raise LostCopies(source)
