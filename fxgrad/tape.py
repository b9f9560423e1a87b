"""The autograd functions of a transformed graph: Tap, Derive, Collect, and the tape they write on.

    tape = new_tape()
    handle = collect(tape, n, *ghosts)      one ghost for each tensor that the backward delivers
    y = linear(x, weight.detach(), ...)     the op stays native
    y = tap(tape, n, y, handle, x)          an identity; its backward writes terms on the tape
    u = weight.t(); h = derive(tape, n, u, handle)      a function of parameters, tapped like one

Every tap depends on the handle, so autograd runs Collect's backward after all of theirs: there, in one
place of one traced graph, everything about every parameter is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import traceback as fx_traceback

from fxgrad.costs.choices import Ways
from fxgrad.gradients.parts import Part, has_complex, in_full_precision, joined, summed
from fxgrad.gradients.sample_grads import SampleGrads, kept
from fxgrad.gradients.virtual import pulled_back
from fxgrad.quantities import Quantity
from fxgrad.strategies import Contributions, OwnStrategy, Strategy, matched
from fxgrad.terms import Term
from fxgrad.uses import Use


@dataclass(frozen=True)
class Like:
    """What a parameter is like."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Tape:
    """What the taps of one forward wrote down: per parameter key, the parts of its gradients."""

    grads: ClassVar[type[SampleGrads]] = SampleGrads

    def __init__(
        self,
        quantities: Sequence[Quantity],
        loss_scale: float | str,
        likes: Sequence[Like],
        given: Sequence[int],
        ways: Ways,
    ) -> None:
        self.quantities, self.loss_scale, self.likes = quantities, loss_scale, likes
        self.given = given  # how many tensors each quantity is given
        self.ways = ways
        self.dense = any(quantity.dense for quantity in quantities)
        self.bounded = not all(quantity.dense for quantity in quantities)  # somebody asks how far rounding is off
        self.parts: dict[int, list[Part]] = {}
        self.derived: list[tuple[int, Strategy, list[Any], int]] = []
        self.bent: set[int] = set()  # functions of parameters that do more than move them
        self.moved: dict[int, str] = {}  # those that do not, and whose elements they move
        self.task: int | None = None

    def derive(self, key: int, strategy: Strategy) -> None:
        """One more function of parameters."""
        if not (strategy.keeps or strategy.cuts) or any(parent in self.bent for parent in strategy.use.wrt.values()):
            self.bent.add(key)
        else:
            self.moved[key] = self._name(next(iter(strategy.use.wrt.values())))

    def begin(self) -> None:
        """Forget what a backward that never reached Collect left behind."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task = task
            self.parts.clear()
            self.derived.clear()

    def scaled(self, g: Tensor, n: int) -> Tensor:
        """g for a loss that is a sum over samples."""
        if isinstance(self.loss_scale, str):  # "mean"
            return g * n
        return g * self.loss_scale if self.loss_scale != 1 else g

    def record(self, strategy: Strategy, g: Tensor, values: list[Any], n: int) -> None:
        """Differentiate one use and add what it says about each of its parameters."""
        self.add(strategy.use, strategy.terms(g, values, n), n)

    def add(self, use: Use, parts: Contributions, n: int, *, scaled: bool = True) -> None:
        """What one use says about each of its parameters; ``scaled``: for a loss that is a sum over samples."""
        for slot, part in parts:
            key = use.wrt[slot]
            self.note(key, part if scaled or not isinstance(part, Term | Tensor) else self._scaled_part(part, n))

    def note(self, key: int, part: Part) -> None:
        """One more part of a parameter's gradients."""
        part = self._real(key, part)
        parts = self.parts.setdefault(key, [])
        if not self.bounded:  # what is multiplied out in any case does not wait: waiting factors raise the peak
            parts[:] = [summed([*parts, part])]
            return
        with in_backward():
            part = in_full_precision(part)
            if key in self.bent:  # its function may enlarge what rounding did: nothing is rounded before
                parts.append(part)
            else:
                parts[:] = [joined([*parts, part])] if self.dense else [*parts, kept(part, self._name(key), self.ways)]

    def _name(self, key: int) -> str:
        """The parameter's, also of what moves its elements; none for another function of parameters."""
        return self.likes[key].name if key < len(self.likes) else self.moved.get(key, "")

    def _real(self, key: int, part: Part) -> Part:
        """A real parameter's gradient is the real part of what complex factors give."""
        if key >= len(self.likes) or self.likes[key].dtype.is_complex:
            return part
        dense = part.dense() if isinstance(part, Term) and any(map(_is_complex, part.factors)) else part
        return dense.real if isinstance(dense, Tensor) and dense.is_complex() else dense

    def _scaled_part(self, part: Term | Tensor, n: int) -> Term | Tensor:
        return part.scaled(lambda factor: self.scaled(factor, n)) if isinstance(part, Term) else self.scaled(part, n)

    def pull_back(self) -> None:
        """From functions of parameters to the parameters, children before their parents."""
        for key, strategy, values, n in self.derived:
            parts = self.parts.pop(key, None)
            if parts and (not self.bounded or any(map(has_complex, parts)) or any(map(_is_complex, values))):
                self.record(strategy, summed(parts), values, n)
            elif parts:
                self.add(strategy.use, pulled_back(strategy, parts, values, n, self.ways), n)
        self.derived.clear()

    def results(self, n: int, like: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
        """What the quantities make of all that was written down, in the order of their deliveries."""
        rows = [
            self.grads(own.name, own.shape, own.dtype, n, like, self.parts.get(key, []), self.ways)
            for key, own in enumerate(self.likes)
        ]
        found: list[Tensor] = []
        left = list(given)
        for quantity, wanted in zip(self.quantities, self.given, strict=True):
            grads = [own.grouped(quantity.group_size) for own in rows]
            found += quantity.compute(grads, quantity.units(n), left[:wanted])
            del left[:wanted]
        return found


def _is_complex(factor: Any) -> bool:
    return isinstance(factor, Tensor) and factor.is_complex()


class Tap(torch.autograd.Function):
    """The identity behind an op that uses parameters; its backward hands g to the op's rule."""

    @staticmethod
    def forward(
        tape: Tape, strategy: Strategy, dirty: bool, n: int, y: Tensor, handles: int, *rest: Any
    ) -> Tensor:
        return y if dirty else y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.tape, ctx.strategy, dirty, ctx.n, y, handles, *rest = inputs
        if dirty:
            ctx.mark_dirty(y)
        ctx.inputs = len(inputs)
        _keep(ctx, rest[handles:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is not None:
            ctx.tape.begin()
            with torch.autocast(g.device.type, enabled=False), torch.no_grad():
                values = matched(_kept(ctx), g)
                ctx.tape.record(ctx.strategy, ctx.tape.scaled(g.detach(), ctx.n), values, ctx.n)
        return (None, None, None, None, g, *[None] * (ctx.inputs - 5))


class TapSeveral(torch.autograd.Function):
    """The identity behind the outputs of an op that has several."""

    @staticmethod
    def forward(tape: Tape, strategy: Strategy, n: int, handles: int, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(y.clone() for y in rest[: len(strategy.use.several)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.tape, ctx.strategy, ctx.n, handles, *rest = inputs
        ctx.inputs = len(inputs)
        ctx.like = [y.detach() for y in output]
        _keep(ctx, rest[len(output) + handles :])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if any(g is not None for g in grads):
            ctx.tape.begin()
            with torch.autocast(ctx.like[0].device.type, enabled=False), torch.no_grad():
                full = [torch.zeros_like(y) if g is None else g for g, y in zip(grads, ctx.like, strict=True)]
                scaled = [ctx.tape.scaled(g.detach(), ctx.n) for g in full]
                values = matched(_kept(ctx), scaled[0])
                ctx.tape.add(ctx.strategy.use, ctx.strategy.terms_of_several(scaled, values, ctx.n), ctx.n)
        return (None, None, None, None, *grads, *[None] * (ctx.inputs - 4 - len(grads)))


class OwnTap(torch.autograd.Function):
    """An op with a backward of fxgrad's own: it gives its inputs' gradients and writes its parameters' terms."""

    @staticmethod
    def forward(tape: Tape, strategy: OwnStrategy, n: int, handles: int, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(strategy.use.rerun(rest[handles:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.tape, ctx.strategy, ctx.n, ctx.handles, *rest = inputs
        ctx.outputs = len(output)
        ctx.mark_non_differentiable(*output[ctx.strategy.rule.outputs :])
        _keep(ctx, [*output, *rest[ctx.handles :]])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kept = _kept(ctx)
        outputs, values = kept[: ctx.outputs], kept[ctx.outputs :]
        with torch.autocast(outputs[0].device.type, enabled=False), torch.no_grad():
            by_operand, parts = ctx.strategy.gradients(grads, outputs, values, ctx.n)
            ctx.tape.begin()
            ctx.tape.add(ctx.strategy.use, parts, ctx.n, scaled=False)
        return (None, None, None, None, *[None] * ctx.handles, *by_operand)


class Derive(torch.autograd.Function):
    """A handle for a function of parameters; its backward notes how to pull a gradient back through it."""

    @staticmethod
    def forward(
        tape: Tape, strategy: Strategy, key: int, n: int, handles: int, *rest: Any
    ) -> Tensor:
        handle: Tensor = rest[0]
        tape.derive(key, strategy)
        return handle.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.tape, ctx.strategy, ctx.key, ctx.n, handles, *rest = inputs
        ctx.inputs = len(inputs)
        _keep(ctx, rest[handles:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> Any:
        ctx.tape.begin()
        ctx.tape.derived.append((ctx.key, ctx.strategy, _kept(ctx), ctx.n))
        return (None,) * ctx.inputs


class Collect(torch.autograd.Function):
    """Stands between all parameters and the graph; its backward returns what the quantities deliver."""

    @staticmethod
    def forward(tape: Tape, n: int, ghosts: int, *rest: Tensor) -> Tensor:
        return rest[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.tape, ctx.n, ghosts, *rest = inputs
        ctx.like, ctx.ghosts = output.detach(), ghosts
        ctx.save_for_backward(*rest[ghosts:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> Any:
        tape: Tape = ctx.tape
        tape.begin()
        with torch.autocast(ctx.like.device.type, enabled=False), torch.no_grad(), in_backward():
            tape.pull_back()
            results = tape.results(ctx.n, ctx.like, ctx.saved_tensors)
        tape.parts.clear()
        return (None, None, None, *results, *[None] * len(ctx.saved_tensors))


class Single(torch.autograd.Function):
    """A batch of one: the ordinary gradient is the sample's, ``[1, *p.shape]``."""

    @staticmethod
    def forward(tape: Tape, key: int, handle: Tensor, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.tape, ctx.key, _, _ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is not None:
            ctx.tape.begin()
            with torch.no_grad():
                ctx.tape.note(ctx.key, ctx.tape.scaled(g.detach(), 1).unsqueeze(0))
        return None, None, None, None


# Note [What stays in the backward]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A Gram matrix x xᵀ is made of what the forward knows, and the partitioner would move it there and save it. What
# only the quantities need is traced under the partitioner's own tag.


def in_backward() -> contextlib.AbstractContextManager[None]:
    """See Note [What stays in the backward]."""
    try:
        from torch._functorch._aot_autograd.graph_capture_wrappers import (
            set_partitioner_tag_must_be_in_backward,
        )
    except ImportError:  # where PyTorch has no such tag, the partitioner decides
        return contextlib.nullcontext()
    if not fx_traceback.has_preserved_node_meta():  # nobody is tracing
        return contextlib.nullcontext()
    tagged: contextlib.AbstractContextManager[None] = set_partitioner_tag_must_be_in_backward()
    return tagged


def _keep(ctx: Any, values: list[Any]) -> None:
    """Save tensors for the backward, sizes and absent operands beside them."""
    ctx.template = [None if isinstance(value, Tensor) else (value,) for value in values]
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))


def _kept(ctx: Any) -> list[Any]:
    saved = iter(ctx.saved_tensors)
    return [next(saved) if item is None else item[0] for item in ctx.template]
