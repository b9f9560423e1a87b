"""`fxgrad.explain`: what fxgrad does with a model, parameter by parameter, and what that costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.api import engine_of, transform
from fxgrad.batch import SHARED, map_tensors
from fxgrad.calls import op_name
from fxgrad.capture import Engine
from fxgrad.context import Context, source_line, tensors_of
from fxgrad.costs import at, formula
from fxgrad.errors import BatchSizeError
from fxgrad.explanation import Cost, Explained, Explanation, Step, Total, Value
from fxgrad.layouts import Kind, Layout, Samples
from fxgrad.passes.decompose_recurrent import decompose_recurrent
from fxgrad.pipeline import PASSES
from fxgrad.printing import dtype_name
from fxgrad.rehearsal import Part, Rehearsal, rehearse
from fxgrad.targets import (
    TAPS,
    CollectTarget,
    DeriveTarget,
    NewTape,
    OwnTapTarget,
    TapSeveralTarget,
    TapTarget,
)
from fxgrad.tracing import Trace, capture
from fxgrad.uses import Use


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """What fxgrad does with every parameter of ``model(*args, **kwargs)``, and what it costs.

    For each parameter its uses, one by one: the line of the model, whether a rule of its own, the elementwise
    rule or the generic one differentiates it, the einsum of its gradient per sample, where the samples are,
    the flops. A function of parameters (``w.t()``) is a use too, followed by the uses of its value. Frozen and
    unused parameters are listed as such.

    Numbers are for the batch at hand; `Cost.formula` has them in B and the other sizes that change. Bytes are
    bytes, flops twice the multiplications. The totals compare with the plain model's step: products and
    convolutions as `torch.utils.flop_counter` counts them, forward and backward, and the memory of what waits
    for the backward (before a compiler saves some of it by computing it again).

    ``model`` may be transformed already; its options then apply. Nothing runs and nothing of the model changes.

    Returns:
        An `Explanation`: print it, or take ``.to_dict()``, or ``.to_html("page.html")``.

    Raises:
        what the first call of the transformed model would raise: `MixedSamples`, `UnsupportedOp`, ...

    >>> print(explain(nn.Linear(3, 2), torch.randn(5, 3)))
    Linear at B = 5
    <BLANKLINE>
    parameter  shape   use     line  by    term              samples   grad_sample  flops
    weight     [2, 3]  linear        rule  n...o,n...i->noi  dim 0: B        120 B     60
    bias       [2]     linear        rule  n...o->no         dim 0: B         40 B     10
    <BLANKLINE>
    total                   plain step  with fxgrad
    forward                    60 flop      60 flop
    backward                   60 flop      60 flop
    saved for the backward         0 B          0 B
    gradients                     32 B        160 B
    """
    engine = engine_of(model) or engine_of(transform(model))
    assert engine is not None
    args, kwargs, size = _two_samples(engine, args, kwargs)
    plain: list[fx.GraphModule] = []

    def keep_plain(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        plain.append(gm)
        return gm

    place = PASSES.index(decompose_recurrent) + 1
    trace = capture(engine, args, kwargs, (*PASSES[:place], keep_plain, *PASSES[place:]))
    return _Explainer(engine.model, trace, plain[0], size).explanation()


def _two_samples(engine: Engine, args: Any, kwargs: Any) -> tuple[Any, Any, int]:
    """A batch of one is explained as two equal samples: alone, it is captured without looking for samples."""
    batch = engine.roles.find(args, kwargs)
    if batch.size == 0:
        raise BatchSizeError("explain needs samples: the batch is empty", advice="Pass a batch of one or more.")
    if batch.size > 1:
        return args, kwargs, batch.size

    def doubled(x: Tensor) -> Tensor:
        dim = batch.dims.get(id(x), SHARED)
        return x if dim < 0 else torch.cat([x, x], dim).detach().requires_grad_(x.requires_grad)

    return *map_tensors((args, kwargs), doubled), 1


class _Explainer:
    """Reads a rewritten graph."""

    def __init__(self, model: nn.Module, trace: Trace, plain: fx.GraphModule, size: int) -> None:
        self.model, self.graph, self.ctx, self.size = model, trace.graph_module.graph, trace.context, size
        self.notes: list[str] = []
        self.plain = self._rehearse(plain, "the plain step")
        self.own = self._rehearse(trace.graph_module, "the transformed model")
        self.taps = [_Tap(node) for node in self.graph.nodes if isinstance(node.target, (*TAPS, DeriveTarget))]
        self.roots = self._roots()

    def _rehearse(self, gm: fx.GraphModule, what: str) -> Rehearsal | None:
        """A rehearsal, or a note why there is none: what cannot be counted can still be explained."""
        try:
            return rehearse(gm, self.ctx, self.size)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.notes.append(f"{what} was not counted: {type(error).__name__}: {first}")
            return None

    def explanation(self) -> Explanation:
        parameters, values = tuple(self._parameters()), _Drawing(self).values()
        self._note_what_is_not_counted(parameters)
        names = {name: at(symbol, self.ctx.symbols, self.size) for symbol, name in self.ctx.symbols.names.items()}
        return Explanation(
            type(self.model).__name__,
            self.size,
            {name: size for name, size in names.items() if size is not None},
            parameters,
            tuple(self._totals(parameters)),
            tuple(self.notes),
            values,
        )

    def _roots(self) -> dict[int, set[int]]:
        """Key on the tape -> the keys of the parameters that its value is a function of."""
        roots = {key: {key} for key in range(len(self.ctx.parameters))}
        for tap in self.taps:
            if tap.key is not None:
                roots[tap.key] = set().union(*(roots[key] for key in tap.use.wrt.values()))
        return roots

    def _parameters(self) -> Iterator[Explained]:
        keys = {parameter.name: key for key, parameter in enumerate(self.ctx.parameters)}
        names: dict[int, list[str]] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        for name, p in self.model.named_parameters():
            steps = tuple(self._steps(keys[name])) if name in keys else ()
            status = "frozen" if not p.requires_grad else "trained" if steps else "unused"
            size = self.ctx.symbols.symbol * p.numel() * p.element_size()
            aliases = tuple(alias for alias in names[id(p)] if alias != name)
            yield Explained(
                name,
                aliases,
                tuple(p.shape),
                dtype_name(p.dtype),
                status,
                self._cost(size) if p.requires_grad else Cost(),
                steps,
            )

    def _steps(self, key: int) -> Iterator[Step]:
        """The ops through which a parameter's gradient per sample comes, in the order of the graph."""
        made = {tap.key: tap.node.prev.name for tap in self.taps if tap.key is not None}
        for tap in self.taps:
            for slot, used in tap.use.wrt.items():
                if key in self.roots[used]:
                    yield self._step(tap, slot, made.get(used, ""))

    def _step(self, tap: _Tap, slot: int, of: str) -> Step:
        parts = [part for part in self.own.parts if part.use is tap.use and part.slot == slot] if self.own else []
        known = [part.flops for part in parts if part.flops is not None]
        node = tap.behind
        return Step(
            op_name(tap.use.op).split("::")[-1].split(".")[-1],
            node.name,
            tap.strategy.name,
            of,
            tuple(term_text(part) for part in parts),
            (modules_of(node) or [""])[-1],
            line_of(node),
            self.type_of(node),
            where(tap.layout),
            self._cost(sum(known)) if known and len(known) == len(parts) else Cost(),
        )

    def _totals(self, parameters: Sequence[Explained]) -> Iterator[Total]:
        for what, unit, field in (
            ("forward", "flop", "forward"),
            ("backward", "flop", "backward"),
            ("saved for the backward", "B", "saved"),
        ):
            costs = [self._cost(getattr(r, field)) if r is not None else Cost() for r in (self.plain, self.own)]
            yield Total(what, unit, *costs)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        ordinary = sum(p.numel() * p.element_size() for p in trained)
        yield Total("gradients", "B", self._cost(ordinary), self._cost(self.ctx.symbols.symbol * ordinary))

    def _note_what_is_not_counted(self, parameters: Sequence[Explained]) -> None:
        opaque = sorted({name for node in self.graph.nodes if (name := _opaque(node))})
        if opaque:
            self.notes.append(f"flops leave out what happens inside of {', '.join(opaque)}")
        if any(step.by == "generic" for p in parameters for step in p.steps):
            self.notes.append("flops leave out the generic rule, which runs the op's own derivative under vmap")

    def _cost(self, cost: Any) -> Cost:
        symbols = self.ctx.symbols
        return Cost(formula(cost, symbols), at(cost, symbols, self.size))

    def type_of(self, node: fx.Node) -> str:
        """A value's dtype and shape: ``f32[B, 4]``."""
        values = tensors_of(node.meta.get("fake"))
        shapes = [f"{dtype_name(v.dtype)}[{', '.join(map(self.ctx.symbols.show, v.shape))}]" for v in values]
        return ", ".join(shapes)


class _Tap:
    """A node of the graph that differentiates an op."""

    def __init__(self, node: fx.Node) -> None:
        target: Any = node.target
        self.node, self.strategy, self.use = node, target.strategy, target.strategy.use
        self.key: int | None = target.key if isinstance(target, DeriveTarget) else None
        use: Use = self.use
        self.layout = use.several[0][1] if use.several else use.output
        self.behind = _behind(node)


def _behind(node: fx.Node) -> fx.Node:
    """The op that a tap differentiates."""
    if isinstance(node.target, DeriveTarget):
        return node.prev
    if isinstance(node.target, OwnTapTarget):
        return node
    y = node.args[2]
    assert isinstance(y, fx.Node)
    source = y.args[0] if isinstance(node.target, TapSeveralTarget) else y
    assert isinstance(source, fx.Node)
    return source


class _Drawing:
    """The graph's values without the machinery: no tape, no handles, no sizes; a tap is a mark of its op."""

    def __init__(self, explainer: _Explainer) -> None:
        self.explainer, self.ctx = explainer, explainer.ctx
        self.taps = {tap.behind: tap for tap in explainer.taps}
        self.same: dict[fx.Node, fx.Node] = {}  # a value that is drawn as another one

    def values(self) -> tuple[Value, ...]:
        found = []
        for node in self.explainer.graph.nodes:
            stands_for = self._stands_for(node)
            if stands_for is not None:
                self.same[node] = self.same.get(stands_for, stands_for)
            elif self._drawn(node):
                found.append(self._value(node))
        return tuple(found)

    def _stands_for(self, node: fx.Node) -> fx.Node | None:
        source = node.args[0] if node.args else None
        if isinstance(node.target, TapTarget | TapSeveralTarget):
            return _behind(node)
        if isinstance(source, fx.Node):
            of_parameter = node.target == "detach" and source.name in self.ctx.by_node
            of_several = not isinstance(source.meta.get("fake"), Tensor) and op_name(node.target) == "getitem"
            return source if of_parameter or of_several else None
        return None

    def _drawn(self, node: fx.Node) -> bool:
        if node.op == "output":
            return True
        machinery = isinstance(node.target, DeriveTarget | CollectTarget | NewTape)
        if machinery or node.name in self.ctx.by_node or self._constant(node):
            return False
        return bool(tensors_of(node.meta.get("fake")))

    def _constant(self, node: fx.Node) -> bool:
        """An input that is the same for all samples and holds no trainable parameter."""
        held = node.op in ("placeholder", "get_attr") and isinstance(node.meta.get("fake"), Tensor)
        samples = node.meta.get("samples")
        return held and isinstance(samples, Samples) and samples.kind is Kind.CONSTANT

    def _value(self, node: fx.Node) -> Value:
        operands = [self.same.get(arg, arg) for arg in node.all_input_nodes]
        parameters = [self.ctx.by_node[arg.name].name for arg in operands if arg.name in self.ctx.by_node]
        constants = [self.ctx.names.get(arg.name, arg.name) for arg in operands if self._constant(arg)]
        drawn = [arg.name for arg in operands if self._drawn(arg)]
        tensor = next(iter(tensors_of(node.meta.get("fake"))), None)
        source = drawn_from[0] if node.op == "output" and (drawn_from := node.all_input_nodes) else node
        samples = _first(source.meta.get("samples"))
        layout = samples.layout if samples else None
        symbols = self.ctx.symbols
        return Value(
            node.name,
            {"placeholder": "input", "output": "output"}.get(node.op) or _short(node),
            samples.kind.value if samples else "constant",
            tuple(modules_of(node)) if node.op.startswith("call") else (),
            line_of(node) if node.op.startswith("call") else self.ctx.names.get(node.name, ""),
            "" if tensor is None else dtype_name(tensor.dtype),
            () if tensor is None else tuple(symbols.show(size) for size in tensor.shape),
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
        parts = self.explainer.own.parts if self.explainer.own else []
        terms = dict.fromkeys(term_text(part) for part in parts if part.use is tap.use)
        return ": ".join([tap.strategy.name, *(["; ".join(terms)] if terms else [])])


def _first(samples: Any) -> Samples | None:
    several = samples if isinstance(samples, list) else [samples]
    return next((s for s in several if isinstance(s, Samples)), None)


def _short(node: fx.Node) -> str:
    name = node.target.strategy.use.op if isinstance(node.target, OwnTapTarget) else op_name(node.target)
    return name.split("::")[-1].split(".")[-1]


def _opaque(node: fx.Node) -> str:
    """The name of an operator that PyTorch's flop counter does not look into."""
    use: Any = node.target.strategy.use if isinstance(node.target, OwnTapTarget) else None
    name = use.op if use else op_name(node.target) if node.op == "call_function" else ""
    return name if "::" in name and not name.startswith("aten::") else ""


def term_text(part: Part) -> str:
    """How a contribution is computed, in a few letters."""
    if part.term is None:
        return "per sample" if part.flops is None else "summed" if part.flops != 0 else "moved"
    return part.term.equation.replace(" ", "")


def where(layout: Layout | None) -> str:
    """Where the samples are: ``dim 0: B``, ``dim 0: 5*B`` (the sample index inside), ``shared by all``."""
    if layout is None:
        return "shared by all"
    if layout.rows is not None:
        return f"dim {layout.dim}: rows of packed data"
    sizes = ["?" if size is None else str(size) for size in (layout.outer, layout.inner)]
    factors = [sizes[0]] * (sizes[0] != "1") + ["B"] + [sizes[1]] * (sizes[1] != "1")
    return f"dim {layout.dim}: {'*'.join(factors)}"


def line_of(node: fx.Node) -> str:
    """The user's own line that made a node; empty where only PyTorch's did."""
    line = source_line(node)
    return "" if line.startswith("in ") else line


def modules_of(node: fx.Node) -> list[str]:
    """The modules a node is computed in, outermost first, the model itself left out: ``layers.0: Linear``."""
    found = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        words = [a or b for a, b in re.findall(r"\['([^']+)'\]|\.(\w+)", str(path))]
        name = ".".join(word for word in words if word not in ("original", "_modules"))
        if name:
            found.append(f"{name}: {getattr(kind, '__name__', kind)}")
    return found
