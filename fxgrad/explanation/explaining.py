"""`fxgrad.explain`: the treatment of each parameter of a model by fxgrad, with its costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.api import engine_of, transform
from fxgrad.capture.sharded import check_not_sharded
from fxgrad.compile.dry_run import Rehearsal, rehearse
from fxgrad.compile.pipeline import PASSES
from fxgrad.costs.choices import Choice
from fxgrad.costs.flops import at, formula
from fxgrad.engine import Engine
from fxgrad.errors import BatchSizeError, OptionError
from fxgrad.explanation.drawing import page
from fxgrad.explanation.findings import Contracted, Cost, Explained, Findings, Option, Step, Total
from fxgrad.explanation.text import as_text
from fxgrad.explanation.values import (
    NO_GRADIENT,
    GraphValues,
    TapNode,
    line_of,
    modules_of,
    opaque,
    short_name,
    term_text,
    where,
)
from fxgrad.graph.context import Context
from fxgrad.graph.printing import dtype_name
from fxgrad.kernels.compiled import libraries_asked
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import FAKE
from fxgrad.ops.values import tensors_of
from fxgrad.passes.attach_taps import attach_taps
from fxgrad.passes.decompose_recurrent import decompose_recurrent
from fxgrad.passes.wrap_transforms import Stretch
from fxgrad.quantities import Quantity
from fxgrad.runtime.targets import TAPS, DeriveTarget
from fxgrad.samples.batch import SHARED, map_tensors
from fxgrad.samples.symbols import expression
from fxgrad.terms.work import Way
from fxgrad.tracing import Trace, capture, settled_batch

COUNTED = (("forward", "flop", "forward"), ("backward", "flop", "backward"), ("saved for the backward", "B", "saved"))


@dataclass(frozen=True, repr=False)
class Explanation(Findings):
    """The treatment of a model by fxgrad, as returned by `fxgrad.explain`.

    ``str()`` is a table, `to_dict` gives data for JSON, `to_html` a page.

    Attributes:
        model: the name of the model's class.
        batch_size: the number of samples in the batch.
        sizes: the size of each symbol, such as ``{"B": 5}``.
        parameters: one `Explained` for each parameter, with its uses.
        totals: flops and bytes of the plain step and of the transformed model's.
        notes: sentences about the samples, such as ops that you registered.
        values: the values of the rewritten graph, in its order.
        quantities: the names of the quantities.
        machine: the machine that milliseconds are estimated for; empty without estimates.

    >>> import torch, fxgrad
    >>> explanation = fxgrad.explain(torch.nn.Linear(3, 2), torch.randn(5, 3))
    >>> [parameter.name for parameter in explanation.parameters]
    ['weight', 'bias']
    """

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a self-contained page with the table and the graph; also write it to ``path`` if set."""
        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def explain(
    model: nn.Module, *args: Any, quantity: Quantity | Sequence[Quantity] | None = None, **kwargs: Any
) -> Explanation:
    """Explain the treatment and the costs of every parameter of ``model(*args, **kwargs)``.

    The explanation lists each use of a parameter, with the line of the model and the rule that differentiates it: the
    rule of the op, the elementwise one or the generic one. It shows the einsum of the per-sample gradient, the layout
    of the samples, and the flops. A function of parameters (``w.t()``) is a use too, followed by the uses of its value.
    Frozen and unused parameters are listed as such, and uses that no gradient reaches, as behind ``detach()``.

    Numbers are for this batch; `Cost.formula` has them in B and the other dynamic sizes. One multiplication counts as
    two flops. The totals compare with the plain model's step. They count products and convolutions as
    `torch.utils.flop_counter` does, forward and backward, and the memory saved for the backward, before a compiler
    recomputes some of it. Recurrent layers of the plain step are counted as fxgrad computes them: what PyTorch's own
    kernels save depends on the device.

    If a quantity needs norms or sums instead of the gradients, each use has a strategy, chosen by the cost model or
    ``strategy=``. Its flops are those of its products. `Step.contracted` has the chosen strategy, the reason, and the
    cost of each one. If the gradients of a parameter are still materialised, at B times its size,
    `Explained.materialised` is True.

    explain leaves the model unchanged, and computes nothing unless the model fails on the inputs.

    Args:
        model: a model, or a transformed one, whose options then apply.
        args: as the model takes them.
        quantity: as in `fxgrad.transform`; None: GradSample, or the quantity of a transformed model.
        kwargs: as the model takes them.

    Returns:
        An `Explanation`: print it, or take ``.to_dict()``, or ``.to_html("page.html")``.

    Raises:
        FxgradError: any error of the transformed model's first call: `MixedSamples`, `UnsupportedOp`, ...
        RuntimeError, TypeError, ..: the model's own, for inputs of a wrong shape or number, as in `fxgrad.trace`.
        OptionError: quantity= is passed with a model that is already transformed.

    Source: the graph of `fxgrad.trace`, the cost model of ``fxgrad.costs`` and `torch.utils.flop_counter`.

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
    check_not_sharded(model, "explain")
    engine = engine_of(model) or engine_of(transform(model, quantity=quantity))
    assert engine is not None
    args, kwargs, size = _two_samples(engine, args, kwargs)
    kept: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        kept.append(gm)
        return gm

    early, late = PASSES.index(decompose_recurrent) + 1, PASSES.index(attach_taps)
    trace = capture(engine, args, kwargs, (*PASSES[:early], keep, *PASSES[early:late], keep, *PASSES[late:]))
    captured, decomposed = kept
    wrapped = any(isinstance(node.target, Stretch) for node in captured.graph.nodes)
    plain = decomposed if wrapped else captured  # the levels of torch.func do not open on fake tensors
    return _Explainer(engine.model, trace, plain, size).explanation()


def _two_samples(engine: Engine, args: Any, kwargs: Any) -> tuple[Any, Any, int]:
    """Double a batch of one, as fxgrad captures a single sample without inferring sample layouts."""
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
    """The reader of a rewritten graph, which makes its explanation."""

    def __init__(self, model: nn.Module, trace: Trace, plain: fx.GraphModule, size: int) -> None:
        self.model, self.graph, self.ctx, self.size = model, trace.graph_module.graph, trace.context, size
        self.notes: list[str] = [*trace.context.notes]
        self.dense = any(quantity.dense for quantity in self.ctx.quantities)
        self.plain = self._rehearse(plain, "the plain step")
        with libraries_asked() as self.libraries:
            self.transformed = self._rehearse(trace.graph_module, "the transformed model")
        self.parts = self.transformed.parts if self.transformed is not None else []
        self.taps = [TapNode(node) for node in self.graph.nodes if isinstance(node.target, (*TAPS, DeriveTarget))]
        self.roots = self._roots()

    def _rehearse(self, gm: fx.GraphModule, subject: str) -> Rehearsal | None:
        """Count the costs of a graph; on failure, add a note and return None, as the rest can still be explained."""
        try:
            return rehearse(gm, self.ctx, self.size)
        except OptionError:  # a strategy that does not match the graph
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.notes.append(f"{subject} was not counted: {type(error).__name__}: {first}")
            return None

    def explanation(self) -> Explanation:
        parameters = tuple(self._parameters())
        values = GraphValues(self.graph, self.ctx, self.taps, self.parts).values()
        self._add_notes(parameters)
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
            "" if self.dense else self.ctx.planner.machine.name or "a machine of the user's own",
        )

    def _roots(self) -> dict[int, set[int]]:
        """Map each key on the tape to the keys of the parameters that its value is a function of."""
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
            reached = any(step.terms != (NO_GRADIENT,) for step in steps)
            status = "frozen" if not p.requires_grad else "trained" if reached else "unreached" if steps else "unused"
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
        """Yield the ops that contribute to a parameter's per-sample gradient, in graph order."""
        derived = {tap.key: tap.node.prev.name for tap in self.taps if tap.key is not None}
        for tap in self.taps:
            for slot, used in tap.use.wrt.items():
                if key in self.roots[used]:
                    yield self._step(tap, slot, derived.get(used, ""))

    def _step(self, tap: TapNode, slot: int, of: str) -> Step:
        parts = [part for part in self.parts if part.use is tap.use and part.slot == slot]
        choice = next((part.choice for part in parts if part.choice is not None and not self.dense), None)
        flops = [part.flops for part in parts] if choice is None or choice.found is None else self._work(choice)[:1]
        known = [count for count in flops if count is not None]
        node = tap.behind
        return Step(
            short_name(op_name(tap.use.op)),
            node.name,
            tap.strategy.name,
            of,
            tuple(term_text(part) for part in parts) or ((NO_GRADIENT,) if self.transformed is not None else ()),
            (modules_of(node) or [""])[-1],
            line_of(node),
            ", ".join(dtype_name(v.dtype) + self.ctx.symbols.show_shape(v.shape) for v in tensors_of(FAKE.get(node))),
            where(tap.layout),
            self._cost(sum(known)) if known and len(known) == len(flops) else Cost(),
            None if choice is None else self._contracted(choice),
        )

    def _work(self, choice: Choice, way: Way | None = None) -> list[Any]:
        """Return the flops and the bytes of a strategy, by default of the chosen one."""
        assert choice.found is not None
        work = choice.work(self.ctx.planner.sums, way)
        counts = (work.flops, work.bytes)
        return [choice.found.expression(count, self.ctx.symbols.symbol, expression) for count in counts]

    def _contracted(self, choice: Choice) -> Contracted:
        options = []
        for way, price in choice.costs.items():
            flops, size = map(self._cost, self._work(choice, way))
            options.append(Option(way.value, flops, size, float(f"{1e3 * price.seconds:.3g}")))
        return Contracted(choice.way.value, choice.why, choice.way is Way.MATERIALISE, tuple(options))

    def _totals(self, parameters: Sequence[Explained]) -> Iterator[Total]:
        for name, unit, field in COUNTED:
            costs = [self._cost(getattr(r, field)) if r is not None else Cost() for r in (self.plain, self.transformed)]
            yield Total(name, unit, *costs)
        bytes_of = {name: p.numel() * p.element_size() for name, p in self.model.named_parameters() if p.requires_grad}
        ordinary = sum(bytes_of.values())
        b = self.ctx.symbols.symbol
        if self.dense:
            yield Total("gradients", "B", self._cost(ordinary), self._cost(b * ordinary))
            return
        delivered = self.ctx.deliveries(self.ctx.symbols.b)
        size = sum(math.prod(map(expression, d.shape)) * d.dtype.itemsize for d in delivered)
        yield Total("results", "B", self._cost(ordinary), self._cost(size))
        materialised = sum(bytes_of[p.name] for p in parameters if p.materialised)
        yield Total("gradients held", "B", Cost("0", 0), self._cost(b * materialised))

    def _add_notes(self, parameters: Sequence[Explained]) -> None:
        """Note the work that is not counted, and the kernels that are not compiled."""
        hidden = sorted({name for node in self.graph.nodes if (name := opaque(node))})
        if hidden:
            self.notes.append(f"flops leave out what happens inside of {', '.join(hidden)}")
        if any(step.by == "generic" for p in parameters for step in p.steps):
            self.notes.append("flops leave out the generic rule, which runs the op's own derivative under vmap")
        for library in self.libraries:
            reason = library.why_off()
            if reason:
                self.notes.append(f"kernels in C++ are off, so {library.computes} take longer: {reason}")

    def _cost(self, cost: Any) -> Cost:
        symbols = self.ctx.symbols
        return Cost(formula(cost, symbols), at(cost, symbols, self.size))
