"""The view of an op that the handlers of its family get: its operands with layouts, and the possible answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.ops.calls import Call
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.families import Family, family_of
from fxgrad.samples.layouts import Kind, Layout, Samples
from fxgrad.samples.replay import Replay
from fxgrad.samples.symbols import Symbols, expression


@dataclass(frozen=True)
class Mixes:
    """The answer of an op that lets samples influence each other; ``linear`` if it only sums or averages them."""

    reason: str
    linear: bool = False
    advice: str = ""  # more specific than the general advice to keep the op within a sample


class Crossed(Exception):
    """Raised where samples influence each other."""

    def __init__(self, reason: str, advice: str = "", node: fx.Node | None = None, whole: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice  # more specific than the general advice to keep the op within a sample
        self.node = node  # the node at fault, if it is not the one that is visited
        self.whole = whole  # whether the reason is a sentence without the op's name


@dataclass(frozen=True)
class Operand:
    """One tensor operand: its argument name, node, fake value and samples."""

    name: str
    node: fx.Node
    fake: Tensor
    samples: Samples

    @property
    def layout(self) -> Layout | None:
        return self.samples.layout

    def place(self, worked: Collection[int]) -> int | None:
        """Return the place of the samples, from the right, among the dims that an op does not work over."""
        others = [dim for dim in range(self.fake.dim()) if dim not in worked]
        dim = None if self.layout is None else self.layout.dim
        return others.index(dim) - len(others) if dim in others else None

    def last_dims(self, count: int) -> range:
        """Return the last ``count`` dims, or all if there are fewer."""
        ndim = self.fake.dim()
        return range(max(ndim - count, 0), ndim)


@dataclass(frozen=True)
class Op:
    """An op with its operands."""

    node: fx.Node
    call: Call
    operands: Sequence[Operand]
    replay: Replay

    @property
    def symbols(self) -> Symbols:
        return self.replay.symbols

    @property
    def family(self) -> Family | None:
        """Return the family of the op.

        A view of another dtype leaves each element in its place if it has the same width; else it has no family.
        """
        values = (*self.node.args, *self.node.kwargs.values())
        if self.call.op != "view" or not any(isinstance(value, torch.dtype) for value in values):
            return family_of(self.call.op)
        fakes = [FAKE.of(self.node.args[0]), FAKE.of(self.node)]
        alike = fakes[0].element_size() == fakes[1].element_size() and not any(fake.is_complex() for fake in fakes)
        return Family.ELEMENTWISE if alike else None

    @property
    def outputs(self) -> list[Any]:
        """Return the fake value of each output."""
        fake = FAKE.of(self.node)
        return list(fake) if isinstance(fake, tuple | list) else [fake]

    @property
    def flows(self) -> list[bool]:
        """Return whether a trainable parameter's gradient flows into each output."""
        traced = TRACED.of(self.node)
        return traced if isinstance(traced, list) else [traced]

    @property
    def kinds(self) -> set[Kind]:
        return {operand.samples.kind for operand in self.operands}

    @property
    def batched(self) -> Iterator[tuple[Operand, Layout]]:
        for operand in self.operands:
            if operand.layout is not None:
                yield operand, operand.layout

    @property
    def promoted(self) -> Op:
        """Return the op with a layout to check for each constant that has one dim of the samples' size."""
        merges = self.merges()

        def promote(operand: Operand) -> Operand:
            dims = self.symbols.batch_dims(operand.fake.shape)
            if operand.samples.kind is not Kind.CONSTANT or len(dims) != 1:
                return operand
            merge = merges.get(expression(operand.fake.shape[dims[0]]))
            return operand if merge is None else replace(operand, samples=Samples(Kind.BATCHED, merge.at(dims[0])))

        return replace(self, operands=[promote(operand) for operand in self.operands])

    def merges(self) -> dict[sympy.Expr, Layout]:
        """Return how samples are merged in dims of each size, from the operands that hold samples."""
        return {expression(operand.fake.shape[layout.dim]): layout for operand, layout in self.batched}

    def operand(self, name: str) -> Operand | None:
        return next((operand for operand in self.operands if operand.name == name), None)

    def dims(self, name: str, ndim: int) -> list[int] | None:
        """Return the non-negative dims that an argument names; None for all dims."""
        value = self.call.get(name)
        dims = value if isinstance(value, tuple | list) else [value]
        return None if value is None or not dims else [dim % max(ndim, 1) for dim in dims if isinstance(dim, int)]


Answer = Layout | Mixes
Handler = Callable[[Op, Tensor], Answer]


def by_shape(op: Op, output: Tensor) -> Answer:
    """Return the layout of the one output dim with the symbol B, merged as in the operand of the same size."""
    dims = op.symbols.batch_dims(output.shape)
    if len(dims) != 1:
        return Mixes("its result has no sample dimension" if not dims else "its result has two sample dimensions")
    size = expression(output.shape[dims[0]])
    if size == op.symbols.symbol:
        return Layout(dims[0])
    merges = {
        layout.at(dims[0]) for operand, layout in op.batched if expression(operand.fake.shape[layout.dim]) == size
    }
    return merges.pop() if len(merges) == 1 else Mixes("its operands hold the samples in different orders")
