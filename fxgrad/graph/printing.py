"""A rewritten graph as text: stable, without addresses or machine paths, fit for a snapshot.

inputs:
  x: f32[B, 3]                                    batched(0)
  weight: f32[2, 3]                               trainable
gradient placeholders:
  grad_placeholder(weight): f32[B, 2, 3]
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, grad_placeholder(weight))
  linear = linear(x, weight.detach(), None)       f32[B, 2] batched(0)
  linear' = tap_linear(tape, B, linear, handle, x)    rule
return linear'
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context
from fxgrad.ops.calls import CALL, op_name
from fxgrad.ops.facts import EXAMPLE, FAKE
from fxgrad.runtime.targets import CollectTarget, DeriveTarget, NewTape, SingleTarget, TapTarget, Target
from fxgrad.samples.layouts import SAMPLES, Samples

_DTYPES = dict(
    zip(
        "float64 float32 float16 bfloat16 int64 int32 bool complex64 complex128".split(),
        "f64 f32 f16 bf16 i64 i32 b8 c64 c128".split(),
        strict=True,
    )
)
_COLUMN = 64


def graph_text(gm: fx.GraphModule, ctx: Context) -> str:
    """Return the text of a graph that the pipeline made."""
    return _Printer(gm, ctx).text()


class _Printer:
    def __init__(self, gm: fx.GraphModule, ctx: Context) -> None:
        self.gm, self.ctx = gm, ctx
        self.names: dict[fx.Node, str] = {}
        self.taken: set[str] = set()

    def text(self) -> str:
        inputs: list[str] = []
        placeholders: list[str] = []
        body: list[str] = []
        result = ""
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self._input(node, inputs, placeholders)
            elif node.op == "output":
                result = f"return {self._value(node.args[0])}"
            else:
                self._call(node, body)
        sections = [("inputs:", inputs), ("gradient placeholders:", placeholders), ("graph:", body)]
        lines = [line for title, content in sections if content for line in [title, *content]]
        return "\n".join([*lines, result]) + "\n"

    def _name(self, node: fx.Node, wish: str) -> str:
        name, count = wish, 1
        while name in self.taken:
            count += 1
            name = f"{wish}_{count}"
        self.taken.add(name)
        self.names[node] = name
        return name

    def _input(self, node: fx.Node, inputs: list[str], placeholders: list[str]) -> None:
        label = self.ctx.labels.get(node.name)
        if label is not None:
            placeholders.append(f"  {self._name(node, label)}")
            return
        fake = FAKE.get(node, EXAMPLE.get(node))
        if isinstance(fake, torch.SymInt):
            self.names[node] = self.ctx.symbols.show(fake)
            return
        name = self._name(node, self.ctx.names.get(node.name, node.name))
        trainable = node.name in self.ctx.by_node
        remark = "trainable" if trainable else str(SAMPLES.get(node) or "")
        inputs.append(_columns(f"  {name}: {self._type(fake)}", remark))

    def _call(self, node: fx.Node, body: list[str]) -> None:
        fake = FAKE.get(node, EXAMPLE.get(node))
        source = node.args[0] if node.args else None
        if op_name(node.target) == "detach" and isinstance(source, fx.Node) and source.name in self.ctx.by_node:
            self.names[node] = f"{self.names[source]}.detach()"
            return
        if isinstance(fake, int | float | torch.SymInt) or str(node.target) == "aten.sym_size.int":
            self.names[node] = "B" if fake is None else self.ctx.symbols.show(fake)
            return
        if node.op == "get_attr":
            self.names[node] = str(node.target)
            return
        call, wish, remark = self._form(node)
        args = [self._value(arg) for arg in node.args]
        args += [f"{key}={self._value(arg)}" for key, arg in node.kwargs.items()]
        line = f"{call}({', '.join(args)})"
        body.append(_columns(f"  {self._name(node, wish)} = {line}", remark))

    def _form(self, node: fx.Node) -> tuple[str, str, str]:
        """Return how a call is written: the function, the name of its result, a remark."""
        target = node.target
        if isinstance(target, NewTape):
            return f"new_tape[{', '.join(map(str, target.quantities))}]", "tape", ""
        if isinstance(target, CollectTarget):
            return "collect", "handle", ""
        if isinstance(target, TapTarget):
            behind = node.args[2]
            assert isinstance(behind, fx.Node)
            return target.__name__, f"{self.names[behind]}'", target.strategy.name
        if isinstance(target, DeriveTarget):
            return target.__name__, "derived", target.strategy.name
        name = op_name(target).split("::")[-1].split(".")[-1] if not isinstance(target, Target) else target.__name__
        call = CALL.get(node)
        guessed = "guessed argument names" if call is not None and call.guessed else ""
        remark = f"{self._type(FAKE.get(node))} {_samples(SAMPLES.get(node))} {guessed}".strip()
        return name, target.__name__ if isinstance(target, SingleTarget) else name.rstrip("_"), remark

    def _type(self, fake: Any) -> str:
        if isinstance(fake, Tensor):
            return dtype_name(fake.dtype) + self.ctx.symbols.show_shape(fake.shape)
        if isinstance(fake, tuple | list):
            return f"({', '.join(self._type(item) for item in fake)})"
        return "" if fake is None else type(fake).__name__

    def _value(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, tuple | list):
            inner = ", ".join(self._value(item) for item in arg)
            return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{key!r}: {self._value(item)}" for key, item in arg.items()) + "}"
        if isinstance(arg, slice):
            parts = ["" if part is None else self._value(part) for part in (arg.start, arg.stop, arg.step)]
            return ":".join(parts[:2] if not parts[2] else parts)
        return repr(arg)


def _samples(samples: Any) -> str:
    if isinstance(samples, list):
        return ", ".join(str(item) for item in samples if isinstance(item, Samples))
    return str(samples) if isinstance(samples, Samples) else ""


def _columns(left: str, right: str) -> str:
    return f"{left.ljust(_COLUMN)}  {right}".rstrip() if right else left.rstrip()


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype in short: ``f32``."""
    return _DTYPES.get(str(dtype).removeprefix("torch."), str(dtype))


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Lines with aligned columns, those in ``right`` flush right.

    >>> print("\\n".join(table(["name", "n"], [["a", "12"], ["bcd efg", "3"]], right={1})))
    name      n
    a        12
    bcd efg   3
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    aligned = [
        [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (titles, *rows)
    ]
    return ["  ".join(cells).rstrip() for cells in aligned]
