"""torch.cond, scan, map and while_loop in a captured graph: each is one call, and its bodies give its sample layouts.

PyTorch computes the forward and the gradients of inputs. A parameter's gradient for sample n is that of the same op on
sample n alone. The generic rule's operator computes it at run time in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.ops.user_functions import text_of_body
from fxgrad.samples.layouts import Kind, Samples, holds_samples
from fxgrad.samples.operands import Crossed

Pair = tuple[Any, Samples | None]  # a fake value and its `Samples`
Run = Callable[[fx.GraphModule, Sequence[Pair]], Sequence[Pair]]  # (body, operands) -> the body's outputs


class ControlFlow:
    """A call target that stands for ``op(*bodies, *groups)``; it holds the bodies and takes the groups as one list."""

    __module__ = "fxgrad.samples.control_flow"
    op: Any

    def __init__(self, bodies: Sequence[fx.GraphModule], sizes: Sequence[int]) -> None:
        self.bodies, self.sizes = list(bodies), list(sizes)
        self.__name__ = self.__qualname__ = str(self.op.name())

    def __repr__(self) -> str:
        return str(self.__name__)

    def groups(self, args: Sequence[Any]) -> list[list[Any]]:
        """Split the arguments into the groups that the op takes."""
        ends = list(accumulate(self.sizes))
        return [list(args[end - size : end]) for size, end in zip(self.sizes, ends, strict=True)]

    def __call__(self, *args: Any) -> Any:
        return self.op(*self.bodies, *self.groups(args))

    def alone(self, *args: Any) -> list[Tensor]:
        """Compute the op in plain Python."""
        raise NotImplementedError

    def samples(self, run: Run, args: Sequence[Pair]) -> list[Samples | None]:
        """Return the samples of each output, from those of the bodies' outputs."""
        raise NotImplementedError

    def text(self) -> str:
        """Return the computation in words."""
        return f"{[text_of_body(body) for body in self.bodies]}{self.sizes}"


def _call(body: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    result = fx.Interpreter(body).run(*args)
    return list(result) if isinstance(result, tuple | list) else [result]


class Cond(ControlFlow):
    """``cond(pred, true, false, operands)``"""

    op = torch.ops.higher_order.cond

    def __call__(self, *args: Any) -> Any:
        return self.op(args[0], *self.bodies, args[1:])

    def alone(self, *args: Any) -> list[Tensor]:
        return _call(self.bodies[0] if args[0] else self.bodies[1], args[1:])

    def samples(self, run: Run, args: Sequence[Pair]) -> list[Samples | None]:
        _, decides = args[0]
        if holds_samples(decides):
            raise Crossed("which branch runs depends on samples")
        true, false = (run(body, args[1:]) for body in self.bodies)
        return [_joined(a, b) for (_, a), (_, b) in zip(true, false, strict=True)]


class Scan(ControlFlow):
    """``scan(body, init, xs, additional)``: body(carry, x) -> carry, y, over dimension 0 of xs."""

    op = torch.ops.higher_order.scan

    def alone(self, *args: Any) -> list[Tensor]:
        carry, xs, rest = self.groups(args)
        ys = []
        for step in zip(*xs, strict=True):
            outputs = _call(self.bodies[0], [*carry, *step, *rest])
            carry, y = outputs[: len(carry)], outputs[len(carry) :]
            ys.append(y)
        return [*carry, *(torch.stack(column) for column in zip(*ys, strict=True))]

    def samples(self, run: Run, args: Sequence[Pair]) -> list[Samples | None]:
        init, xs, rest = self.groups(args)
        slices = list(map(_slice, xs))
        outputs, carry = _settled(lambda carry: run(self.bodies[0], [*carry, *slices, *rest]), init)
        return [*carry, *_stacked(outputs[len(init) :])]


class Map(ControlFlow):
    """``map(body, xs, additional)``: body(x) -> y, over dimension 0 of xs."""

    op = torch.ops.higher_order.map_impl

    def alone(self, *args: Any) -> list[Tensor]:
        xs, rest = self.groups(args)
        outputs = [_call(self.bodies[0], [*step, *rest]) for step in zip(*xs, strict=True)]
        return [torch.stack(column) for column in zip(*outputs, strict=True)]

    def samples(self, run: Run, args: Sequence[Pair]) -> list[Samples | None]:
        xs, rest = self.groups(args)
        along = [samples for _, samples in xs if holds_samples(samples) and samples.layout and samples.layout.dim == 0]
        if not along:
            return _stacked(run(self.bodies[0], [*map(_slice, xs), *rest]))
        others = [samples for _, samples in xs if holds_samples(samples) and samples.layout != along[0].layout]
        if others or any(holds_samples(samples) for _, samples in rest):
            raise Crossed("it maps over one sample's values together with another's")
        constant = Samples(Kind.CONSTANT)  # the body sees one sample at a time
        shapes = run(self.bodies[0], [*((x[0], constant) for x, _ in xs), *rest])
        return [replace(along[0], traced=False) for _ in shapes]


class WhileLoop(ControlFlow):
    """``while_loop(cond, body, carried, additional)``"""

    op = torch.ops.higher_order.while_loop

    def alone(self, *args: Any) -> list[Tensor]:
        carried, rest = self.groups(args)
        while _call(self.bodies[0], [*carried, *rest])[0]:
            carried = _call(self.bodies[1], [*carried, *rest])
        return carried

    def __call__(self, *args: Any) -> Any:
        carried, rest = self.groups(args)
        return self.op(*self.bodies, tuple(carried), tuple(rest))

    def samples(self, run: Run, args: Sequence[Pair]) -> list[Samples | None]:
        carried, rest = self.groups(args)
        _, settled = _settled(lambda values: run(self.bodies[1], [*values, *rest]), carried)
        last = [(value, samples) for (value, _), samples in zip(carried, settled, strict=True)]
        ((_, decides),) = run(self.bodies[0], [*last, *rest])
        if holds_samples(decides):
            raise Crossed("how often its body runs depends on samples")
        return settled


CONTROL_FLOW: dict[str, type[ControlFlow]] = {f"higher_order::{c.op.name()}": c for c in (Cond, Scan, Map, WhileLoop)}


def _joined(a: Samples | None, b: Samples | None) -> Samples | None:
    """Return the samples of a value that is one of two."""
    if a is None or b is None or a == b:
        return a
    if holds_samples(a) and holds_samples(b):
        raise Crossed("its bodies hold the samples in different places")
    return next(filter(holds_samples, (a, b)), Samples(Kind.UNIFORM))


def _settled(run: Callable[[Sequence[Pair]], Sequence[Pair]], init: Sequence[Pair]) -> tuple[Any, list[Samples | None]]:
    """Run a body to a fixpoint; return its outputs and the samples of its carry."""
    carry = [samples and replace(samples, traced=False) for _, samples in init]  # as in a body's outputs
    while True:
        outputs = run([(value, samples) for (value, _), samples in zip(init, carry, strict=True)])
        joined = [_joined(old, new) for old, (_, new) in zip(carry, outputs, strict=False)]
        if joined == carry:  # each round lifts at least one value: constant < uniform < with samples
            return outputs, carry
        carry = joined


def _slice(pair: Pair) -> Pair:
    """Return one slice along dimension 0, with its samples."""
    value, samples = pair
    if samples is not None and samples.layout is not None and samples.layout.dim == 0:
        raise Crossed("it runs along the sample dimension")
    return value[0], _moved(samples, -1)


def _stacked(outputs: Sequence[Pair]) -> list[Samples | None]:
    """Return the samples of all steps' outputs, stacked along a new dimension 0."""
    return [_moved(samples, 1) for _, samples in outputs]


def _moved(samples: Samples | None, by: int) -> Samples | None:
    if samples is None or samples.layout is None:
        return samples
    return replace(samples, layout=samples.layout.at(samples.layout.dim + by))
