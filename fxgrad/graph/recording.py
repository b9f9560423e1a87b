"""The record of one call that uses parameters: what a tap or a derive has to know of it, and what it reads."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.errors import UnsupportedOp
from fxgrad.graph.context import Context, source_line
from fxgrad.ops.calls import CALL, Call, map_nodes
from fxgrad.ops.facts import FAKE, put_facts
from fxgrad.ops.values import memory
from fxgrad.ops.written import writers_by_memory
from fxgrad.rules.strategies import Strategy
from fxgrad.rules.uses import Slot, Use
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples, samples_of_outputs
from fxgrad.samples.symbols import expression


class Recorder:
    """Writes the records of one graph, while taps are put into it."""

    def __init__(self, graph: fx.Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        self.keys: dict[fx.Node, int] = {}  # values that a tap can differentiate by
        self.replaced: dict[fx.Node, fx.Node] = {}  # what stands for a node now
        self.copied: dict[fx.Node, fx.Node] = {}  # copies of a parameter for all samples, and the one of them
        self.values: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
        self.writers = writers_by_memory(graph)

    def use(self, node: fx.Node, layout: Layout | None, select: int | None = None) -> tuple[Use, list[Any]]:
        """Return the record of a call, and its operands."""
        operands: list[Any] = []

        def slot(arg: fx.Node) -> Any:
            arg = self.copied.get(arg, arg)
            fake = FAKE.of(arg)
            if isinstance(fake, torch.SymInt | torch.SymFloat | int | float) and self._of_one_sample(fake) is not None:
                return self._of_one_sample(fake)
            if isinstance(fake, tuple | list) and not any(isinstance(item, Tensor) for item in fake):
                return self._sizes(node, fake)
            return Slot(_place(arg, operands))

        args = map_nodes(node.args, slot)
        kwargs = map_nodes(dict(node.kwargs), slot)
        packed = None
        if layout is not None and layout.rows is not None:  # what says how packed data was packed is an operand, too
            first, second = (_place(self._value(name), operands) for name in layout.rows)
            packed = first, second
        call: Call = CALL.of(node)
        value = FAKE.of(node) if select is None else FAKE.of(node)[select]
        use = Use(
            call.op,
            node.target,
            node.op == "call_method",
            args,
            kwargs,
            map_nodes(dict(call.arguments), lambda arg: slot(self.replaced.get(arg, arg))),
            tuple(self._layout(arg, layout) for arg in operands),
            {i: self.keys[arg] for i, arg in enumerate(operands) if arg in self.keys},
            layout,
            select,
            call.inplace,
            packed,
            is_complex=isinstance(value, Tensor) and value.is_complex(),
        )
        return use, operands

    def saved(self, node: fx.Node, operands: Sequence[fx.Node], strategy: Strategy) -> list[fx.Node | None]:
        """Return the operands the strategy looks at; of one that this op or a later one writes over, a copy."""
        needed = strategy.needs.union(strategy.use.packed or ())
        return [self._unwritten(arg, node) if i in needed else None for i, arg in enumerate(operands)]

    def _unwritten(self, value: fx.Node, node: fx.Node) -> fx.Node:
        if all(writer < node for writer in self.writers[memory(value)]):
            return value
        with self.graph.inserting_before(node):
            copy = self.graph.call_method("clone", (value,))
        put_facts(copy, {FAKE: FAKE.of(value), SAMPLES: SAMPLES.of(value)})
        return copy

    def _value(self, name: str) -> fx.Node:
        """Return the node that `Layout.rows` names: an input, or one of an op's outputs."""
        source, _, index = name.removesuffix("]").partition("[")
        node = self.values[source]
        if not index:
            return node
        if name not in self.values:
            with self.graph.inserting_after(node):
                self.values[name] = self.graph.call_function(operator.getitem, (node, int(index)))
            facts = {FAKE: FAKE.of(node)[int(index)], SAMPLES: samples_of_outputs(node)[int(index)]}
            put_facts(self.values[name], facts)
        return self.values[name]

    def _of_one_sample(self, size: Any) -> Any:
        """Return a size that changes with B, as one sample's call has it; None for another symbolic size."""
        if not isinstance(size, torch.SymInt | torch.SymFloat):
            return size
        if expression(size).free_symbols <= {self.ctx.symbols.symbol}:
            return self.ctx.symbols.evaluate(size, 1)
        return None

    def _sizes(self, node: fx.Node, sizes: Sequence[Any]) -> tuple[Any, ...]:
        numbers = tuple(map(self._of_one_sample, sizes))
        if None in numbers:
            raise UnsupportedOp(
                "a shape with two changing sizes meets a parameter",
                where=source_line(node),
                advice="Split the op in two, so that each shape has one size that changes besides the samples.",
            )
        return numbers

    def _layout(self, arg: fx.Node, output: Layout | None) -> Layout | None:
        """Return where an operand holds the samples; constants of B's size line up with the output."""
        samples = SAMPLES.get(arg)
        if not isinstance(samples, Samples) or output is None:
            return None
        if samples.kind is Kind.BATCHED:
            return samples.layout
        dims = self.ctx.symbols.batch_dims(FAKE.of(arg).shape)
        return output.at(dims[0]) if len(dims) == 1 and samples.kind is Kind.CONSTANT else None


def _place(operand: fx.Node, operands: list[Any]) -> int:
    """Return the place of an operand, which it gets if it has none yet."""
    if operand not in operands:
        operands.append(operand)
    return operands.index(operand)
