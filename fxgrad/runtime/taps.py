"""The autograd functions of a transformed graph: Tap, Derive, Collect; they write on a tape (tape.py).

    tape = new_tape()
    handle = collect(tape, n, *ghosts)      one ghost for each tensor that the backward delivers
    y = linear(x, weight.detach(), ...)     the op stays native
    y = tap(tape, n, y, handle, x)          an identity; its backward writes terms on the tape
    u = weight.t(); h = derive(tape, n, u, handle)      a function of parameters, tapped like one

Every tap depends on the handle, so autograd runs Collect's backward after all of theirs: there, in one
place of one traced graph, everything about every parameter is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxgrad.kernels.partitioning import in_backward
from fxgrad.rules.strategies import OwnStrategy, Strategy, matched
from fxgrad.runtime.tape import Tape


class Tap(torch.autograd.Function):
    """The identity behind an op that uses parameters; its backward hands g to the op's rule."""

    @staticmethod
    def forward(tape: Tape, strategy: Strategy, dirty: bool, n: int, y: Tensor, handles: int, *rest: Any) -> Tensor:
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
                values = ctx.strategy.at_hand(_kept(ctx), g)
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
                ctx.tape.record_several(ctx.strategy, scaled, values, ctx.n)
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
    def forward(tape: Tape, strategy: Strategy, key: int, n: int, handles: int, *rest: Any) -> Tensor:
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


def _keep(ctx: Any, values: list[Any]) -> None:
    """Save tensors for the backward, sizes and absent operands beside them."""
    ctx.template = [None if isinstance(value, Tensor) else (value,) for value in values]
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))


def _kept(ctx: Any) -> list[Any]:
    saved = iter(ctx.saved_tensors)
    return [next(saved) if item is None else item[0] for item in ctx.template]
