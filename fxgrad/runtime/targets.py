"""The named call targets of a rewritten graph, and what autograd does at each.

    tape = new_tape()
    handle = collect(tape, n, *placeholders)      a gradient placeholder for each tensor that the backward delivers
    y = linear(x, weight.detach(), ...)     the op stays native
    y = tap(tape, n, y, handle, x)          an identity; its backward writes terms on the tape
    u = weight.t(); h = derive(tape, n, u, handle)      a function of parameters, tapped like one

Every tap depends on the handle, so autograd runs Collect's backward after all of theirs: there, in one
place of one traced graph, everything about every parameter is known.

Python objects stay out of call arguments: fx prints a graph as code, and AOTAutograd runs that. So a target holds
what it needs besides tensors.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxgrad.costs.choices import Planner
from fxgrad.host.dynamo import as_it_is
from fxgrad.kernels.partitioning import in_backward
from fxgrad.quantities import Quantity
from fxgrad.rules.strategies import OwnStrategy, Strategy, matched
from fxgrad.runtime.tape import Like, Tape, tape_for


class Target:
    """A callable with a name of its own."""

    __module__ = "fxgrad.runtime.targets"

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __repr__(self) -> str:
        return self.__name__


class NewTape(Target):
    def __init__(
        self,
        quantities: Sequence[Quantity],
        loss_scale: float | str,
        likes: Sequence[Like],
        given: Sequence[int],
        planner: Planner,
    ) -> None:
        super().__init__("new_tape")
        self.quantities, self.loss_scale, self.likes, self.given = quantities, loss_scale, likes, given
        self.planner, self.tape = planner, tape_for(quantities)

    def __call__(self) -> Tape:
        return self.tape(self.quantities, self.loss_scale, self.likes, self.given, self.planner)


class Leaf(Target):
    """``leaf(placeholder)``: a gradient placeholder as autograd takes gradients by it, inside of a graph."""

    def __call__(self, placeholder: Tensor) -> Tensor:
        return placeholder.detach().requires_grad_()


class Gradients(Target):
    """``gradients(loss, *leaves)``: the gradient of a loss by each; None where it does not depend on one."""

    def __call__(self, loss: Tensor, *leaves: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(loss.device.type, enabled=False):  # as in the user's backward
            return torch.autograd.grad(loss, leaves, allow_unused=True)


class Recorder(Target, ABC):
    """``target(tape, *operands)``: its backward writes on the tape."""

    def __call__(self, tape: Tape, *operands: Any) -> Any:
        return _Recorded.apply(self, tape, *operands)  # type: ignore[no-untyped-call]

    @abstractmethod
    def forward(self, tape: Tape, *operands: Any) -> Any:
        """Return what autograd sees as the result."""

    @abstractmethod
    def kept(self, ctx: Any, operands: Sequence[Any], output: Any) -> list[Any]:
        """Return what the backward needs; its tensors are saved, all else is kept as it is."""

    @abstractmethod
    def backward(self, tape: Tape, grads: Sequence[Tensor | None], kept: list[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of the operands; None for those behind the last."""


class _Recorded(torch.autograd.Function):
    """The call of a `Recorder`."""

    @staticmethod
    def forward(target: Recorder, tape: Tape, *operands: Any) -> Any:
        return target.forward(tape, *operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.target, ctx.tape, *operands = inputs
        ctx.operands = len(operands)
        ctx.device = (output[0] if isinstance(output, tuple) else output).device.type
        kept = ctx.target.kept(ctx, operands, output)
        ctx.template = [None if isinstance(value, Tensor) else (value,) for value in kept]
        ctx.save_for_backward(*(value for value in kept if isinstance(value, Tensor)))
        ctx.set_materialize_grads(False)

    @staticmethod
    @as_it_is
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = iter(ctx.saved_tensors)
        kept = [next(saved) if item is None else item[0] for item in ctx.template]
        ctx.tape.begin()
        with torch.autocast(ctx.device, enabled=False), torch.no_grad():
            results = ctx.target.backward(ctx.tape, grads, kept)
        return (None, None, *results, *[None] * (ctx.operands - len(results)))


class CollectTarget(Recorder):
    """``collect(tape, n, placeholders.., given..)``: of all parameters; its backward returns deliveries."""

    def __init__(self, placeholders: int) -> None:
        super().__init__("collect")
        self.placeholders = placeholders

    def forward(self, tape: Tape, n: int, *operands: Tensor) -> Tensor:
        return operands[0].new_zeros(())

    def kept(self, ctx: Any, operands: Sequence[Any], output: Tensor) -> list[Any]:
        n, *others = operands
        return [n, [output.detach()], *others[self.placeholders :]]

    def backward(self, tape: Tape, grads: Sequence[Tensor | None], kept: list[Any]) -> Sequence[Tensor | None]:
        n, (like,), *given = kept
        with in_backward():
            tape.pull_back()
            results = tape.results(n, like, given)
        tape.parts.clear()
        return [None, *results]


S = TypeVar("S", Strategy, OwnStrategy)


class _OfOp(Recorder, Generic[S]):
    """A target at an op that uses parameters, or functions of them: ``target(tape, n, .., handles.., operands..)``."""

    prefix: ClassVar[str] = "tap"
    outputs: ClassVar[int] = 0  # how many outputs of an op with one a call takes

    def __init__(self, strategy: S, handles: int) -> None:
        op = re.sub("[^A-Za-z0-9_]+", "_", strategy.use.op.removeprefix("fxgrad::"))
        super().__init__(f"{self.prefix}_{op}")
        self.strategy: S = strategy
        self.handles = handles

    def operands(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the op's operands among the arguments of a call: all behind tape, n, outputs and handles."""
        outputs = len(self.strategy.use.several) or self.outputs
        return args[2 + outputs + self.handles :]


class TapTarget(_OfOp[Strategy]):
    """``tap_linear(tape, n, y, handles.., operands..)``: y; its backward hands y's gradient to the op's rule."""

    outputs = 1

    def forward(self, tape: Tape, n: int, y: Tensor, *others: Any) -> Tensor:
        return y if self.strategy.use.inplace else y.clone()

    def kept(self, ctx: Any, operands: Sequence[Any], output: Tensor) -> list[Any]:
        n, y, *others = operands
        if self.strategy.use.inplace:
            ctx.mark_dirty(y)
        return [n, *others[self.handles :]]

    def backward(self, tape: Tape, grads: Sequence[Tensor | None], kept: list[Any]) -> Sequence[Tensor | None]:
        (g,), (n, *values) = grads, kept
        if g is not None:
            values = self.strategy.at_hand(values, g)
            tape.record(self.strategy, tape.scaled(g.detach() if g.requires_grad else g, n), values, n)
        return [None, g]


class TapSeveralTarget(_OfOp[Strategy]):
    """``tap_autograd_function(tape, n, outputs.., handles.., operands..)``: the outputs of an op that has several."""

    def forward(self, tape: Tape, n: int, *operands: Any) -> tuple[Tensor, ...]:
        return tuple(y.clone() for y in operands[: len(self.strategy.use.several)])

    def kept(self, ctx: Any, operands: Sequence[Any], output: tuple[Tensor, ...]) -> list[Any]:
        n, *others = operands
        return [n, [y.detach() for y in output], *others[len(output) + self.handles :]]

    def backward(self, tape: Tape, grads: Sequence[Tensor | None], kept: list[Any]) -> Sequence[Tensor | None]:
        n, likes, *values = kept
        if any(g is not None for g in grads):
            full = [torch.zeros_like(y) if g is None else g for g, y in zip(grads, likes, strict=True)]
            scaled = [tape.scaled(g.detach(), n) for g in full]
            tape.record_several(self.strategy, scaled, matched(values, scaled[0]), n)
        return [None, *grads]


class OwnTapTarget(_OfOp[OwnStrategy]):
    """``tap_recurrence(tape, n, handles.., operands..)``: an op with a backward of fxgrad's own.

    It gives its inputs' gradients, and writes its parameters' terms.
    """

    def forward(self, tape: Tape, n: int, *operands: Any) -> tuple[Tensor, ...]:
        return tuple(self.strategy.use.rerun(operands[self.handles :]))

    def kept(self, ctx: Any, operands: Sequence[Any], output: tuple[Tensor, ...]) -> list[Any]:
        ctx.mark_non_differentiable(*output[self.strategy.rule.outputs :])
        n, *others = operands
        values = others[self.handles :]
        needed = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(values) :]
        return [n, needed, len(output), *output, *values]

    def backward(self, tape: Tape, grads: Sequence[Tensor | None], kept: list[Any]) -> Sequence[Tensor | None]:
        n, needed, outputs, *values = kept
        by_operand, parts = self.strategy.gradients(grads, values[:outputs], values[outputs:], n, needed)
        tape.add(self.strategy.use, parts, n, scaled=False)
        return [None, *[None] * self.handles, *by_operand]


class DeriveTarget(_OfOp[Strategy]):
    """``derive_transpose(tape, n, handles.., operands..)``: a handle for a function of parameters.

    Its backward notes how to pull a gradient back through the function.
    """

    prefix = "derive"

    def __init__(self, strategy: Strategy, key: int, handles: int) -> None:
        super().__init__(strategy, handles)
        self.key = key

    def forward(self, tape: Tape, n: int, *operands: Any) -> Tensor:
        handle: Tensor = operands[0]
        tape.derive(self.key, self.strategy)
        return handle.clone()

    def kept(self, ctx: Any, operands: Sequence[Any], output: Tensor) -> list[Any]:
        n, *others = operands
        return [n, *others[self.handles :]]

    def backward(self, tape: Tape, grads: Sequence[Tensor | None], kept: list[Any]) -> Sequence[Tensor | None]:
        n, *values = kept
        tape.derived.append((self.key, self.strategy, values, n))
        return []


class SingleTarget(Recorder):
    """``single(tape, handle, parameter)``: in a batch of one, the ordinary gradient is the sample's."""

    def __init__(self, key: int) -> None:
        super().__init__("single")
        self.key = key

    def forward(self, tape: Tape, handle: Tensor, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    def kept(self, ctx: Any, operands: Sequence[Any], output: Tensor) -> list[Any]:
        return []

    def backward(self, tape: Tape, grads: Sequence[Tensor | None], kept: list[Any]) -> Sequence[Tensor | None]:
        (g,) = grads
        if g is not None:
            tape.note(self.key, tape.scaled(g.detach(), 1).unsqueeze(0))
        return []


def hook_if_required(value: Tensor, hook: Callable[..., Any], *given: Tensor) -> Tensor:
    """Register a hook, as Dynamo writes it into graphs, where the value requires a gradient; return the value."""
    if value.requires_grad:
        value.register_hook(lambda grad: hook(grad, *given))
    return value


TAPS = (TapTarget, TapSeveralTarget, OwnTapTarget)
