"""One forward and backward of a graph on fake tensors: what it computes, saves, and writes on the tape."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from fxgrad.context import Context, tensors_of
from fxgrad.costs import elements, is_product, term_flops
from fxgrad.samples.families import MOVEMENT
from fxgrad.samples.symbols import expression
from fxgrad.strategies import Contributions, Strategy
from fxgrad.tape import Tape
from fxgrad.targets import NewTape
from fxgrad.terms import Term
from fxgrad.uses import Use

ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Part:
    """What one use contributed to one parameter's gradient, and what that took."""

    use: Use
    slot: int
    term: Term | None  # None where the rule gave the gradient itself
    flops: sympy.Expr | None  # None where it was computed behind an opaque operator


@dataclass
class Rehearsal:
    """What a forward and a backward did, in the symbolic sizes."""

    forward: sympy.Expr = ZERO  # flops, of products and convolutions alone
    backward: sympy.Expr = ZERO
    saved: sympy.Expr = ZERO  # bytes that the backward waits for, besides parameters and inputs
    parts: list[Part] = field(default_factory=list)


def rehearse(gm: fx.GraphModule, ctx: Context, size: int) -> Rehearsal:
    """Run a graph, as TorchDynamo or as the passes made it, with the batch a symbol; nothing is computed.

    Where an op's own shape rule fixes the batch, it is run again with ``size`` samples.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        return _rehearse(gm, ctx, None)
    except Exception:
        return _rehearse(gm, ctx, size)
    finally:
        log.disabled = before


def _rehearse(gm: fx.GraphModule, ctx: Context, size: int | None) -> Rehearsal:
    found = Rehearsal()
    values = _inputs(gm, ctx, size)
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with ctx.symbols.mode, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _saved(found, [value for value in values if isinstance(value, Tensor)]), forward:
            outputs = _Interpreter(gm, found, backward).run(*values)
        reached = [y for y in tensors_of(outputs) if y.requires_grad]
        with backward:
            if reached:
                torch.autograd.backward(reached, [torch.empty_like(y) for y in reached])
    found.forward = _flops(forward)
    found.backward += _flops(backward)
    return found


def _flops(counter: FlopCounterMode) -> sympy.Expr:
    return expression(counter.get_total_flops())


def _inputs(gm: fx.GraphModule, ctx: Context, size: int | None) -> list[Any]:
    """Fake values for the placeholders, a ghost for each parameter among them; B as a number if ``size`` is one."""
    batch: Any = ctx.symbols.b if size is None else size
    with ctx.symbols.mode:
        own = {name: value if size is None else _at(value, ctx, size) for name, value in ctx.inputs.items()}
        values: list[Any] = []
        added = iter([*((d, True) for d in ctx.deliveries(batch)), *((d, False) for d in ctx.given(batch))])
        device = next(value.device for value in own.values() if isinstance(value, Tensor))
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name not in own:
                delivery, ghost = next(added)
                empty = torch.empty((), dtype=delivery.dtype, device=device).expand(delivery.shape)
                values.append(empty.requires_grad_(ghost))
                continue
            value = own[node.name]
            fresh = isinstance(value, Tensor)
            values.append(value.detach().requires_grad_(value.requires_grad) if fresh else value)
    return values


def _at(value: Any, ctx: Context, size: int) -> Any:
    if not isinstance(value, Tensor):
        return ctx.symbols.evaluate(value, size)
    sizes = [ctx.symbols.evaluate(s, size) for s in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)


@contextmanager
def _saved(found: Rehearsal, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Count the memory that is kept for the backward, each storage once."""
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(storage)
            found.saved += expression(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


class _Interpreter(fx.Interpreter):
    """Runs a graph with a tape that remembers."""

    def __init__(self, gm: fx.GraphModule, found: Rehearsal, counter: FlopCounterMode) -> None:
        super().__init__(gm)
        self.found, self.counter = found, counter

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(target, NewTape):
            return _RememberingTape(target, self.found, self.counter)
        return super().call_function(target, args, dict(kwargs))


class _RememberingTape(Tape):
    """A tape that notes every contribution with its flops; what computing it took natively is not counted twice."""

    def __init__(self, target: NewTape, found: Rehearsal, counter: FlopCounterMode) -> None:
        super().__init__(target.quantities, target.loss_scale, target.likes, target.given)
        self.found, self.counter = found, counter
        self.each: sympy.Expr | None = None  # flops of a gradient that is no term

    def record(self, strategy: Strategy, g: Tensor, values: list[Any], n: int) -> None:
        before = _flops(self.counter)
        moves = strategy.use.op in MOVEMENT
        self.each = None if strategy.name == "generic" else ZERO if moves else 2 * elements(g)
        super().record(strategy, g, values, n)
        self.each = None
        self.found.backward -= _flops(self.counter) - before

    def add(self, use: Use, parts: Contributions, n: int, *, scaled: bool = True) -> None:
        for slot, part in parts:
            term = part if isinstance(part, Term) else None
            flops = self.each if term is None else term_flops(term)
            self.found.parts.append(Part(use, slot, term, flops))
            if term is not None and flops is not None and is_product(term):
                self.found.backward += flops
        super().add(use, parts, n, scaled=scaled)
