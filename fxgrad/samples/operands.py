"""The view of an op that the handlers of its family get: its operands with layouts, and the possible answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fxgrad.ops.calls import Call
from fxgrad.ops.facts import FAKE
from fxgrad.samples.layouts import Kind, Layout, Samples
from fxgrad.samples.replay import Replay
from fxgrad.samples.symbols import Symbols, expression


@dataclass(frozen=True)
class Mixes:
    """The answer of an op that lets samples influence each other; ``linear`` if it only sums or averages them."""

    reason: str
    linear: bool = False
    advice: str = ""  # more specific than the general advice to keep the op within a sample


@dataclass(frozen=True)
class Operand:
    """One tensor operand: its argument name, node, fake value and samples."""

    name: str
    node: fx.Node
    fake: Tensor
    samples: Samples

    @property
    def layout(self) -> Layout | None:
        return self.samples.layout if self.samples.kind is Kind.BATCHED else None


@dataclass(frozen=True)
class Op:
    """An op with its operands, as a handler gets it."""

    node: fx.Node
    call: Call
    operands: Sequence[Operand]
    symbols: Symbols
    replay: Replay

    @property
    def output(self) -> Any:
        return FAKE.of(self.node)

    @property
    def batched(self) -> Iterator[tuple[Operand, Layout]]:
        for operand in self.operands:
            if operand.layout is not None:
                yield operand, operand.layout

    def operand(self, name: str) -> Operand | None:
        return next((operand for operand in self.operands if operand.name == name), None)

    def dims(self, name: str, ndim: int) -> list[int] | None:
        """Return the non-negative dims that an argument names; None for all dims."""
        value = self.call.get(name)
        if value is None or value in ((), []):
            return None
        dims = value if isinstance(value, tuple | list) else [value]
        return [dim % max(ndim, 1) for dim in dims if isinstance(dim, int)]


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


def refuse_dims(op: Op, forbidden: Callable[[Operand], Sequence[int]], what: str) -> Mixes | None:
    for operand, layout in op.batched:
        if layout.dim in forbidden(operand):
            return Mixes(what)
    return None
