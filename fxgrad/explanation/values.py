"""The values of a rewritten graph, prepared for a reader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxgrad.compile.dry_run import Part
from fxgrad.explanation.findings import Value
from fxgrad.graph.context import Context, source_line
from fxgrad.graph.printing import dtype_name
from fxgrad.host.modules import INNER
from fxgrad.kernels.recurrent.flops import FLOPS as OF_RECURRENCES
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import FAKE
from fxgrad.ops.values import tensors_of
from fxgrad.rules.uses import Use
from fxgrad.runtime.targets import CollectTarget, DeriveTarget, NewTape, OwnTapTarget, TapSeveralTarget, TapTarget
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples

NO_GRADIENT = "no gradient"  # the term of a use that no gradient reaches


class TapNode:
    """A tap: a node of the graph that differentiates an op."""

    def __init__(self, node: fx.Node) -> None:
        target: Any = node.target
        use: Use = target.strategy.use
        self.node, self.strategy, self.use = node, target.strategy, use
        self.key: int | None = target.key if isinstance(target, DeriveTarget) else None
        self.layout = use.several[0][1] if use.several else use.output
        self.behind = _behind(node)


def _behind(node: fx.Node) -> fx.Node:
    """Return the op that a tap differentiates."""
    if isinstance(node.target, DeriveTarget):
        return node.prev
    if isinstance(node.target, OwnTapTarget):
        return node
    y: Any = node.args[2]
    source: fx.Node = y.args[0] if isinstance(node.target, TapSeveralTarget) else y
    return source


class GraphValues:
    """The graph's values without tape, handles and sizes; a tap is a mark on its op."""

    def __init__(self, graph: fx.Graph, ctx: Context, taps: Sequence[TapNode], parts: Sequence[Part]) -> None:
        self.graph, self.ctx, self.parts = graph, ctx, parts
        self.taps = {tap.behind: tap for tap in taps}
        self.same: dict[fx.Node, fx.Node] = {}  # a value -> the value that is drawn in its place

    def values(self) -> tuple[Value, ...]:
        values = []
        for node in self.graph.nodes:
            stands_for = self._stands_for(node)
            if stands_for is not None:
                self.same[node] = self.same.get(stands_for, stands_for)
            elif self._drawn(node):
                values.append(self._value(node))
        return tuple(values)

    def _stands_for(self, node: fx.Node) -> fx.Node | None:
        """Return the value that is drawn in a node's place; None for a node that stands for itself."""
        if isinstance(node.target, TapTarget | TapSeveralTarget):
            return _behind(node)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        of_parameter = node.target == "detach" and source.name in self.ctx.by_node
        of_several = not isinstance(FAKE.get(source), Tensor) and op_name(node.target) == "getitem"
        return source if of_parameter or of_several else None

    def _drawn(self, node: fx.Node) -> bool:
        machinery = isinstance(node.target, DeriveTarget | CollectTarget | NewTape)
        hidden = machinery or node.name in self.ctx.by_node or self._constant(node)
        return node.op == "output" or (not hidden and bool(tensors_of(FAKE.get(node))))

    def _constant(self, node: fx.Node) -> bool:
        """Decide whether a node is an input shared by all samples, and no trainable parameter."""
        is_input = node.op in ("placeholder", "get_attr") and isinstance(FAKE.get(node), Tensor)
        samples = SAMPLES.get(node)
        return is_input and isinstance(samples, Samples) and samples.kind is Kind.CONSTANT

    def _value(self, node: fx.Node) -> Value:
        operands = [self.same.get(arg, arg) for arg in node.all_input_nodes]
        parameters = [self.ctx.by_node[arg.name].name for arg in operands if arg.name in self.ctx.by_node]
        constants = [self.ctx.names.get(arg.name, arg.name) for arg in operands if self._constant(arg)]
        drawn = [arg.name for arg in operands if self._drawn(arg)]
        tensor = next(iter(tensors_of(FAKE.get(node))), None)
        source = node.all_input_nodes[0] if node.op == "output" and node.all_input_nodes else node
        samples = _first(SAMPLES.get(source))
        layout = samples.layout if samples else None
        is_call = node.op.startswith("call")
        return Value(
            node.name,
            {"placeholder": "input", "output": "output"}.get(node.op) or short_name(op_of(node)),
            samples.kind.value if samples else "constant",
            tuple(modules_of(node)) if is_call else (),
            line_of(node) if is_call else self.ctx.names.get(node.name, ""),
            "" if tensor is None else dtype_name(tensor.dtype),
            () if tensor is None else tuple(self.ctx.symbols.show(size) for size in tensor.shape),
            where(layout) if layout else "",
            layout.dim if layout else None,
            tuple(dict.fromkeys(drawn)),
            tuple(dict.fromkeys(parameters)),
            tuple(dict.fromkeys(constants)),
            self._mark(node),
        )

    def _mark(self, node: fx.Node) -> str:
        tap = self.taps.get(node)
        if tap is None:
            return ""
        terms = dict.fromkeys(term_text(part) for part in self.parts if part.use is tap.use)
        name: str = tap.strategy.name
        return name + (f": {'; '.join(terms)}" if terms else "")


def _first(samples: Any) -> Samples | None:
    several = samples if isinstance(samples, list) else [samples]
    return next((s for s in several if isinstance(s, Samples)), None)


def op_of(node: fx.Node) -> str:
    """Return the name of a node's op, which may be the tap's own."""
    op: Any = node.target.strategy.use.op if isinstance(node.target, OwnTapTarget) else node.target
    return op_name(op)


def short_name(op: str) -> str:
    """Return the name of an op without its namespace and overload."""
    return op.split("::")[-1].split(".")[-1]


def opaque(node: fx.Node) -> str:
    """Return the name of an operator that no flop counter counts; empty for others."""
    name = op_of(node) if node.op == "call_function" else ""
    counted = name.startswith("aten::") or name in OF_RECURRENCES
    return name if "::" in name and not counted else ""


def term_text(part: Part) -> str:
    """Return a short text for the computation of a contribution."""
    if part.pulled_back:
        return "pulled back"
    if part.term is None:
        return "per sample" if part.flops is None else "summed" if part.flops != 0 else "moved"
    return str(part.term.equation)


def where(layout: Layout | None) -> str:
    """Format a layout: ``dim 0: B``, ``dim 0: 5*B`` (the sample index inside), ``shared by all``."""
    if layout is None:
        return "shared by all"
    if layout.rows is not None:
        return f"dim {layout.dim}: rows of packed data"
    sizes = ["?" if size is None else str(size) for size in (layout.outer, layout.inner)]
    factors = [sizes[0]] * (sizes[0] != "1") + ["B"] + [sizes[1]] * (sizes[1] != "1")
    return f"dim {layout.dim}: {'*'.join(factors)}"


def line_of(node: fx.Node) -> str:
    """Return the user's source line of a node; empty for a node made only by PyTorch's code."""
    line = source_line(node)
    return "" if line.startswith("in ") else line


def modules_of(node: fx.Node) -> list[str]:
    """Return the modules that compute a node, outermost first, without the model: ``layers.0: Linear``."""
    modules = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        words = [a or b for a, b in re.findall(r"\['([^']+)'\]|\.(\w+)", str(path))]
        name = ".".join(word for word in words if word not in ("original", INNER))
        if name:
            modules.append(f"{name}: {getattr(kind, '__name__', kind)}")
    return modules
