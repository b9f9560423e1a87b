"""`fxgrad.explain`: what fxgrad does with a model, parameter by parameter, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.api import engine_of, transform
from fxgrad.batch import SHARED, map_tensors
from fxgrad.calls import op_name
from fxgrad.capture import Engine
from fxgrad.context import Context, tensors_of
from fxgrad.costs.choices import Choice
from fxgrad.costs.contractions import Way
from fxgrad.costs.flops import at, formula
from fxgrad.errors import BatchSizeError, OptionError
from fxgrad.explanation.findings import (
    Contracted,
    Cost,
    Explained,
    Explanation,
    Option,
    Step,
    Total,
)
from fxgrad.explanation.rehearsal import Rehearsal, rehearse
from fxgrad.explanation.values import (
    GraphValues,
    TapNode,
    line_of,
    modules_of,
    opaque,
    term_text,
    where,
)
from fxgrad.passes.attach_taps import attach_taps
from fxgrad.passes.decompose_recurrent import decompose_recurrent
from fxgrad.passes.wrap_transforms import Stretch
from fxgrad.pipeline import PASSES
from fxgrad.printing import dtype_name
from fxgrad.quantities import Quantity
from fxgrad.samples.symbols import expression
from fxgrad.targets import TAPS, DeriveTarget
from fxgrad.tracing import Trace, capture, settled_batch


def explain(
    model: nn.Module, *args: Any, quantity: Quantity | Sequence[Quantity] | None = None, **kwargs: Any
) -> Explanation:
    """What fxgrad does with every parameter of ``model(*args, **kwargs)``, and what it costs.

    For each parameter its uses, one by one: the line of the model, whether a rule of its own, the elementwise
    rule or the generic one differentiates it, the einsum of its gradient per sample, where the samples are,
    the flops. A function of parameters (``w.t()``) is a use too, followed by the uses of its value. Frozen and
    unused parameters are listed as such.

    Numbers are for the batch at hand; `Cost.formula` has them in B and the other sizes that change. Bytes are
    bytes, flops twice the multiplications. The totals compare with the plain model's step: products and
    convolutions as `torch.utils.flop_counter` counts them, forward and backward, and the memory of what waits
    for the backward (before a compiler saves some of it by computing it again).

    Where norms or sums are asked for and not the gradients, each use has a way to be contracted, chosen by the cost
    model or ``strategy=``: which one, why, and what each would take (`Step.contracted`). A parameter whose gradients
    are held multiplied out all the same, B times its size, is `Explained.materialised`.

    ``model`` may be transformed already; its options then apply. Nothing runs and nothing of the model changes.

    Args:
        quantity: as in `fxgrad.transform`; None: GradSample, or a transformed model's own.

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
    if quantity is not None and engine_of(model) is not None:
        raise OptionError(
            "explain got quantity= for a model that is transformed for its own",
            advice="Leave it out, or pass the original model.",
        )
    engine = engine_of(model) or engine_of(transform(model, quantity=quantity))
    assert engine is not None
    args, kwargs, size = _two_samples(engine, args, kwargs)
    kept: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        kept.append(gm)
        return gm

    early, late = PASSES.index(decompose_recurrent) + 1, PASSES.index(attach_taps)
    trace = capture(engine, args, kwargs, (*PASSES[:early], keep, *PASSES[early:late], keep, *PASSES[late:]))
    return _Explainer(engine.model, trace, _plain_step(*kept), size).explanation()


def _plain_step(captured: fx.GraphModule, decomposed: fx.GraphModule) -> fx.GraphModule:
    """The graph as it was captured; torch.func's levels do not open on fake tensors, so there the decomposed one."""
    wrapped = any(isinstance(node.target, Stretch) for node in captured.graph.nodes)
    return decomposed if wrapped else captured


def _two_samples(engine: Engine, args: Any, kwargs: Any) -> tuple[Any, Any, int]:
    """A batch of one is explained as two equal samples: alone, it is captured without looking for samples."""
    batch = settled_batch(engine, args, kwargs)
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
        self.notes: list[str] = [*trace.context.notes]
        self.dense = any(quantity.dense for quantity in self.ctx.quantities)
        self.plain = self._rehearse(plain, "the plain step")
        self.own = self._rehearse(trace.graph_module, "the transformed model")
        self.parts = self.own.parts if self.own is not None else []
        self.taps = [TapNode(node) for node in self.graph.nodes if isinstance(node.target, (*TAPS, DeriveTarget))]
        self.roots = self._roots()

    def _rehearse(self, gm: fx.GraphModule, what: str) -> Rehearsal | None:
        """A rehearsal, or a note why there is none: what cannot be counted can still be explained."""
        try:
            return rehearse(gm, self.ctx, self.size)
        except OptionError:  # a strategy that does not fit
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.notes.append(f"{what} was not counted: {type(error).__name__}: {first}")
            return None

    def explanation(self) -> Explanation:
        parameters = tuple(self._parameters())
        values = GraphValues(self.graph, self.ctx, self.taps, self.parts).values()
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
            tuple(map(str, self.ctx.quantities)),
            "" if self.dense else self.ctx.ways.machine.name or "a machine of the user's own",
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
                p.requires_grad and (self.dense or any(s.contracted and s.contracted.materialised for s in steps)),
            )

    def _steps(self, key: int) -> Iterator[Step]:
        """The ops through which a parameter's gradient per sample comes, in the order of the graph."""
        made = {tap.key: tap.node.prev.name for tap in self.taps if tap.key is not None}
        for tap in self.taps:
            for slot, used in tap.use.wrt.items():
                if key in self.roots[used]:
                    yield self._step(tap, slot, made.get(used, ""))

    def _step(self, tap: TapNode, slot: int, of: str) -> Step:
        parts = [part for part in self.parts if part.use is tap.use and part.slot == slot]
        choice = next((part.choice for part in parts if part.choice is not None and not self.dense), None)
        flops = [part.flops for part in parts] if choice is None or choice.found is None else [self._flops(choice)]
        known = [count for count in flops if count is not None]
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
            self._cost(sum(known)) if known and len(known) == len(flops) else Cost(),
            None if choice is None else self._contracted(choice),
        )

    def _flops(self, choice: Choice, way: Way | None = None) -> Any:
        assert choice.found is not None
        work = choice.work(self.ctx.ways.sums, way)
        return choice.found.expression(work.flops, self.ctx.symbols.symbol, expression)

    def _contracted(self, choice: Choice) -> Contracted:
        options = []
        for way, price in choice.costs.items():
            assert choice.found is not None
            work = choice.work(self.ctx.ways.sums, way)
            size = choice.found.expression(work.bytes, self.ctx.symbols.symbol, expression)
            costs = self._cost(self._flops(choice, way)), self._cost(size)
            options.append(Option(way.value, *costs, float(f"{1e3 * price.seconds:.3g}")))
        return Contracted(choice.way.value, choice.why, choice.way is Way.MATERIALISE, tuple(options))

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
        b = self.ctx.symbols.symbol
        if self.dense:
            yield Total("gradients", "B", self._cost(ordinary), self._cost(b * ordinary))
            return
        delivered = self.ctx.deliveries(self.ctx.symbols.b)
        size = sum(math.prod(map(expression, d.shape)) * d.dtype.itemsize for d in delivered)
        yield Total("results", "B", self._cost(ordinary), self._cost(size))
        own = {name: p for name, p in self.model.named_parameters()}
        held = sum(own[p.name].numel() * own[p.name].element_size() for p in parameters if p.materialised)
        yield Total("gradients held", "B", Cost("0", 0), self._cost(b * held))

    def _note_what_is_not_counted(self, parameters: Sequence[Explained]) -> None:
        hidden = sorted({name for node in self.graph.nodes if (name := opaque(node))})
        if hidden:
            self.notes.append(f"flops leave out what happens inside of {', '.join(hidden)}")
        if any(step.by == "generic" for p in parameters for step in p.steps):
            self.notes.append("flops leave out the generic rule, which runs the op's own derivative under vmap")

    def _cost(self, cost: Any) -> Cost:
        symbols = self.ctx.symbols
        return Cost(formula(cost, symbols), at(cost, symbols, self.size))

    def type_of(self, node: fx.Node) -> str:
        """A value's dtype and shape: ``f32[B, 4]``."""
        values = tensors_of(node.meta.get("fake"))
        shapes = [dtype_name(v.dtype) + self.ctx.symbols.show_shape(v.shape) for v in values]
        return ", ".join(shapes)
