"""One forward and backward of a graph on fake tensors: what it computes, saves, and writes on the tape."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from fxgrad.costs.choices import Choice
from fxgrad.errors import OptionError
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.graph.context import Context, path_to, source_line
from fxgrad.host.dispatch import enable_python_dispatcher
from fxgrad.host.tensors import identity
from fxgrad.kernels.recurrent.flops import FLOPS as OF_RECURRENCES
from fxgrad.ops.families import MOVEMENT
from fxgrad.ops.values import tensors_of
from fxgrad.rules.strategies import Contributions, Strategy
from fxgrad.rules.uses import Use
from fxgrad.runtime.pullback import Virtual
from fxgrad.runtime.tape import DenseTape, FactorTape, Tape
from fxgrad.runtime.targets import TAPS, NewTape, TapTarget
from fxgrad.samples.symbols import elements, expression
from fxgrad.terms import Materialised, Term
from fxgrad.terms.work import Way

ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Part:
    """What one use contributed to one parameter's gradient, and what that took."""

    use: Use
    slot: int
    term: Term | None  # None where the rule gave the gradient itself
    flops: sympy.Expr | None  # None where it was computed behind an opaque operator, or all rows or sums at once
    pulled_back: bool = False  # through a function of parameters that does more than move elements
    choice: Choice | None = None  # how it is contracted, where its gradient itself is not asked for


@dataclass
class Rehearsal:
    """What a forward and a backward did, in the symbolic sizes."""

    forward: sympy.Expr = ZERO  # flops, of products and convolutions alone
    backward: sympy.Expr = ZERO
    saved: sympy.Expr = ZERO  # bytes that the backward waits for, besides parameters and inputs
    parts: list[Part] = field(default_factory=list)
    chosen: dict[str, list[Choice]] = field(default_factory=dict)  # by parameter, for each use and for all together


def rehearse(gm: fx.GraphModule, ctx: Context, size: int) -> Rehearsal:
    """Run a graph, as TorchDynamo or as the passes made it, with the batch a symbol; nothing is computed.

    Where an op's own shape rule fixes the batch, it is run again with ``size`` samples.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        return _rehearse(gm, ctx, None)
    except OptionError:
        raise
    except Exception:
        return _rehearse(gm, ctx, size)
    finally:
        log.disabled = before


def _rehearse(gm: fx.GraphModule, ctx: Context, size: int | None) -> Rehearsal:
    rehearsal = Rehearsal()
    values = _inputs(gm, ctx, size)
    forward, backward = _counter(), _counter()
    with ctx.symbols.mode, enable_python_dispatcher(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _saved(rehearsal, [value for value in values if isinstance(value, Tensor)]), forward:
            outputs = _Interpreter(gm, ctx, rehearsal, backward).run(*values)
        reached = [y for y in tensors_of(outputs) if y.requires_grad]
        with backward:
            if reached:
                torch.autograd.backward(reached, [torch.empty_like(y) for y in reached])
    rehearsal.forward = _flops(forward)
    rehearsal.backward += _flops(backward)
    return rehearsal


def _counter() -> FlopCounterMode:
    formulas = {getattr(torch.ops.fxgrad, name.partition("::")[2]): flops for name, flops in OF_RECURRENCES.items()}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _flops(counter: FlopCounterMode) -> sympy.Expr:
    return expression(counter.get_total_flops())


def _inputs(gm: fx.GraphModule, ctx: Context, size: int | None) -> list[Any]:
    """Make fake values for all inputs, gradient placeholders among them; B is a number if ``size`` is one."""
    batch: Any = ctx.symbols.b if size is None else size
    device = next(value.device for value in ctx.inputs.values() if isinstance(value, Tensor))
    with ctx.symbols.mode:
        added = iter([*((d, True) for d in ctx.deliveries(batch)), *((d, False) for d in ctx.given(batch))])
        values: list[Any] = []
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in ctx.inputs:
                values.append(_fresh(ctx.inputs[node.name], ctx, size))
            else:
                delivery, placeholder = next(added)
                empty = torch.empty((), dtype=delivery.dtype, device=device).expand(delivery.shape)
                values.append(empty.requires_grad_(placeholder))
    return values


def _fresh(value: Any, ctx: Context, size: int | None) -> Any:
    """Return an input's value as a leaf of its own, with B as a number if ``size`` is one."""
    if not isinstance(value, Tensor):
        return value if size is None else ctx.symbols.evaluate(value, size)
    if size is None:
        return value.detach().requires_grad_(value.requires_grad)
    sizes = [ctx.symbols.evaluate(s, size) for s in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)


@contextmanager
def _saved(rehearsal: Rehearsal, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Count the memory that is kept for the backward, each storage once."""
    seen: dict[int, Any] = {identity(tensor.untyped_storage()): None for tensor in inputs}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if identity(storage) not in seen:
            seen[identity(storage)] = storage  # alive, so no other storage has its identity
            rehearsal.saved += expression(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


class _Interpreter(fx.Interpreter):
    """Runs a graph with a tape that remembers."""

    def __init__(self, gm: fx.GraphModule, ctx: Context, rehearsal: Rehearsal, counter: FlopCounterMode) -> None:
        super().__init__(gm)
        self.graph_module, self.ctx, self.rehearsal, self.counter = gm, ctx, rehearsal, counter

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(target, NewTape):
            tape = _RememberingDenseTape if target.tape is DenseTape else _RememberingFactorTape
            return tape(target, self)
        return super().call_function(target, args, dict(kwargs))


class _Watched(SampleGrads):
    """Says so when a quantity multiplies the gradients out."""

    def dense(self) -> Tensor:
        assert self.planner.log is not None
        self.planner.log.append((self.name, Choice(Way.MATERIALISE, "multiplied out for what is made of it")))
        return super().dense()


class _RememberingTape(Tape):
    """A tape that notes every contribution with its flops; what computing it took natively is not counted twice."""

    grads = _Watched

    def __init__(self, target: NewTape, run: _Interpreter) -> None:
        self.log: list[tuple[str, Choice]] = []
        planner = replace(target.planner, log=self.log)
        super().__init__(target.quantities, target.loss_scale, target.likes, target.given, planner)
        self.nodes, self.ctx, self.rehearsal, self.counter = (
            run.graph_module.graph.nodes,
            run.ctx,
            run.rehearsal,
            run.counter,
        )
        self.each: sympy.Expr | None = None  # flops of a gradient that is no term

    @contextmanager
    def _counted_by_terms(self) -> Iterator[None]:
        """Leave out what PyTorch's counter sees here: the flops of each term stand for it."""
        before = _flops(self.counter)
        yield
        self.rehearsal.backward -= _flops(self.counter) - before

    def record(self, strategy: Strategy, g: Tensor, values: list[Any], n: int) -> None:
        moves = strategy.use.op in MOVEMENT
        self.each = None if strategy.name == "generic" else ZERO if moves else 2 * elements(g)
        with self._counted_by_terms():
            super().record(strategy, g, values, n)
        self.each = None

    def add(self, use: Use, parts: Contributions, n: int, *, scaled: bool = True) -> None:
        counted = nullcontext() if scaled else self._counted_by_terms()  # not scaled: of an op with its own backward
        with counted:
            for slot, part in parts:
                term = part if isinstance(part, Term) else None
                moved = isinstance(part, Materialised | Virtual)  # through a function of parameters
                pulled_back = moved and use.op not in MOVEMENT
                flops = None if pulled_back else ZERO if moved else self.each if term is None else term.flops()
                self.log.clear()
                with self._placed(use):
                    super().add(use, [(slot, part)], n, scaled=scaled)
                choice = self._choice(use.wrt[slot], moved)
                self.rehearsal.parts.append(Part(use, slot, term, flops, pulled_back, choice))
                if choice is None and term is not None and flops is not None and term.in_flop_counter():
                    self.rehearsal.backward += flops

    def _choice(self, key: int, moved: bool) -> Choice | None:
        """Return how what was just written down is kept to the end; None where gradients are all that is asked for."""
        return None

    def results(self, n: int, like: Tensor, given: Sequence[Tensor]) -> list[Tensor | None]:
        self.log.clear()
        with self._placed(None):
            return super().results(n, like, given)

    @contextmanager
    def _placed(self, use: Use | None) -> Iterator[None]:
        """Give the error of a strategy that does not fit the user's line, and the samples' path to it."""
        try:
            yield
        except OptionError as error:
            node = self._node(use, error)
            if node is None or error.where:
                raise
            where, path = source_line(node), path_to(node, self.ctx)
            raise OptionError(error.sentence, where=where, path=path, advice=error.advice) from None

    def _node(self, use: Use | None, error: OptionError) -> fx.Node | None:
        """Return the op of a use; of no use in particular, the last one of the parameter that the error names."""
        for node in reversed(self.nodes):
            if isinstance(node.target, TAPS):
                own: Use = node.target.strategy.use
                named = any(f"'{self.name_of(key)}'" in error.sentence for key in own.wrt.values())
                if own is use or (use is None and named):
                    behind = node.args[2] if isinstance(node.target, TapTarget) else node
                    return behind if isinstance(behind, fx.Node) else node
        return None


class _RememberingDenseTape(_RememberingTape, DenseTape):
    """One that multiplies out: nothing is chosen."""


class _RememberingFactorTape(_RememberingTape, FactorTape):
    """One that keeps factors, with what was chosen for each use and for all of them together."""

    def _choice(self, key: int, moved: bool) -> Choice:
        if moved or key in self.non_isometric:
            return Choice(Way.MATERIALISE, "pulled back through a function of parameters")
        dense = next((quantity for quantity in self.quantities if quantity.dense), None)
        if dense is not None:
            return Choice(Way.MATERIALISE, f"{dense} multiplies it out")
        return self.log[-1][1] if self.log else Choice(Way.MATERIALISE, "its rule gives the gradient itself")

    def results(self, n: int, like: Tensor, given: Sequence[Tensor]) -> list[Tensor | None]:
        with self._counted_by_terms():
            results = super().results(n, like, given)
        self._settle()
        return results

    def _settle(self) -> None:
        """What was decided at the end about each parameter's uses together, on the parts; and the flops of it."""
        at_the_end: dict[str, dict[str, Choice]] = {}
        for name, choice in self.log:
            at_the_end.setdefault(name, {}).setdefault(_kind(choice), choice)
        for i, part in enumerate(self.rehearsal.parts):
            name = self.name_of(part.use.wrt[part.slot])
            own, last = part.choice, at_the_end.get(name, {})
            if own is None:
                continue
            if own.found is None and part.term is not None and part.term.in_flop_counter():
                self.rehearsal.backward += part.flops or ZERO
            if own.way is Way.MATERIALISE:
                self._count(own)
            else:
                settled = last.get("") or last.get(_kind(own)) or own
                sizes = [one.found.factors if one.found is not None else None for one in (own, settled)]
                why = settled.why if sizes[1] in (None, sizes[0]) else f"{settled.why}, of its uses together"
                self.rehearsal.parts[i] = replace(part, choice=replace(own, way=settled.way, why=why))
            self.rehearsal.chosen.setdefault(name, []).append(own)
        for choices in at_the_end.values():
            for choice in choices.values():
                self._count(choice)

    def _count(self, choice: Choice) -> None:
        if choice.found is not None:
            flops = choice.work(self.planner.sums).flops
            self.rehearsal.backward += choice.found.expression(flops, self.ctx.symbols.symbol, expression)


def _kind(choice: Choice) -> str:
    return choice.found.kind if choice.found is not None else ""
