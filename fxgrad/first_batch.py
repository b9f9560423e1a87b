"""The check of the first batch: two samples change, and no other sample's results may move.

Two steps run on the compiled graph itself, before the user's own forward: one on the batch as it is, one with two
samples changed. They start from the same random state, on copies of the inputs and buffers. Their results are
gradients by ghosts that lead to no parameter, so nothing is delivered, counted or added.

Note [What the two steps can see]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The user's loss is outside of the model: every output gets a gradient of our own. Where row i of an output belongs to
sample i, the gradient is r (1 + softsign(y / rms)). It has to depend on y: the rows of ``y - y.mean(0)`` by y's own
layer would not move under a constant gradient, and under any user's loss they do. softsign never makes a relative error
of y larger. An output to which all samples add up gets r alone, since a loss inside of the model is linear in it.

r differs from element to element, by each index alone: lengths among the changed values may make an output longer, and
sample i's elements have to keep their r. Where a dimension holds more than the samples (rows of packed data), the
places of a sample in it may move: r is constant there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from fxgrad.changes import Change, Held, chosen, copies, held_inputs
from fxgrad.compared_rows import Rows, largest, moved, sketch
from fxgrad.context import memory_of, tensors_of
from fxgrad.distributed import group_around, largest_of_all
from fxgrad.errors import MixedSamples, OptionError
from fxgrad.oracle import TOLERANCE
from fxgrad.precision import accumulating
from fxgrad.quantities import RESULT, Delivery, Quantity
from fxgrad.samples.layouts import Layout, Samples
from fxgrad.samples.written import written_to

if TYPE_CHECKING:
    from fxgrad.compiler import Transformed



class Verdict(IntEnum):
    """What the check of one batch says; of several processes, the largest holds."""

    PASSED = 0
    SKIPPED = 1  # nothing to compare, or nothing to change: the next batch
    MIXED = 2


@dataclass(frozen=True)
class Facts:
    """What a graph's nodes say about its inputs and outputs, beside `Transformed`'s own."""

    packed: Mapping[int, tuple[int, int] | None]  # inputs of packed sequences, as `Captured.packed` has them
    batched: Mapping[int, Layout]  # outputs that hold the samples, and where
    written: frozenset[int]  # inputs that the graph writes to
    tolerance: float  # by the coarsest dtype that the graph computes in


def facts_of(gm: fx.GraphModule, packed: Mapping[int, tuple[int, int] | None]) -> Facts:
    """Read off what the check has to know while the passes' notes are there."""
    nodes = list(gm.graph.nodes)
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    known = [node.meta.get("samples") if isinstance(node, fx.Node) else None for node in outputs]
    batched = {i: one.layout for i, one in enumerate(known) if isinstance(one, Samples) and one.layout is not None}
    memories = {
        memory_of(place.meta["fake"])
        for node in nodes
        if "call" in node.meta
        for place in written_to(node, node.meta["call"])
    }
    inputs = enumerate(node for node in nodes if node.op == "placeholder")
    written = [i for i, node in inputs if memory_of(node.meta.get("fake")) in memories - {None}]
    dtypes = {value.dtype for node in nodes for value in tensors_of(node.meta.get("fake"))}
    tolerance = max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return Facts(packed, batched, frozenset(written), tolerance)


def sample_dims(quantity: Quantity, n: int, parameters: Mapping[str, Tensor]) -> list[tuple[Delivery, list[int]]]:
    """The deliveries of a quantity, with the dimensions that grow with the number of samples."""
    deliveries = zip(quantity.deliveries(n, parameters), quantity.deliveries(n + 1, parameters), strict=True)
    return [
        (one, [d for d, pair in enumerate(zip(one.shape, more.shape, strict=True)) if pair[0] != pair[1]])
        for one, more in deliveries
    ]


def check_comparable(quantities: Sequence[Quantity], parameters: Mapping[str, Tensor]) -> None:
    """Raise where no quantity has results of single samples."""
    if parameters and not any(dims for q in quantities for _, dims in sample_dims(q, 2, parameters)):
        raise OptionError(
            f"check_first_batch has nothing to compare: {', '.join(map(str, quantities))} has no result per sample",
            advice="Leave out check_first_batch=, and use fxgrad.verify.",
        )


class FirstBatch:
    """Checks one batch of a model, once."""

    def __init__(self, quantities: Sequence[Quantity]) -> None:
        self.quantities = quantities
        self.passed = False
        self.settles = False  # whether processes agree in `settle`, and not in the call of the model
        self._seen: str | None = None  # what this process saw, until they do
        self._agreeing: Any = None  # the group in the call that runs

    def due(self, size: int, parameters: Mapping[str, Tensor]) -> bool:
        """Whether this call's batch can be checked, in every process; each of them has to ask at the same call."""
        self._agreeing = None if self.settles else group_around()
        enough = self._units(size) > 1
        return not largest_of_all(int(not enough), self._agreeing, _device(parameters))

    def check(
        self, graph: Transformed, args: Sequence[Any], parameters: Mapping[str, Tensor], given: Sequence[Tensor]
    ) -> None:
        """Run the two steps and compare them.

        Raises:
            MixedSamples: other samples' results moved, in this process or in another one.
        """
        verdict, seen = Verdict.SKIPPED, ""
        try:
            verdict, seen = self._verdict(graph, args, parameters, given)
        finally:  # no process waits for one that failed
            agreed = largest_of_all(verdict, self._agreeing, _device(parameters))
        if agreed == Verdict.MIXED and self.settles:
            self._seen = seen
        elif agreed == Verdict.MIXED:
            raise _mixed(seen)
        self.passed = agreed != Verdict.SKIPPED

    def settle(self, group: Any, device: torch.device) -> bool:
        """Agree with the other processes, once in each of their steps; whether all of them have passed.

        Raises:
            MixedSamples: in every process, where one saw another sample's results move.
        """
        own = Verdict.SKIPPED if not self.passed else Verdict.PASSED if self._seen is None else Verdict.MIXED
        agreed = largest_of_all(own, group, device)
        if agreed == Verdict.MIXED:
            raise _mixed(self._seen)
        return agreed == Verdict.PASSED

    def _units(self, size: int) -> int:
        """The fewest samples that a quantity makes of the batch."""
        return int(min(quantity.units(size) for quantity in self.quantities))

    def _verdict(
        self, graph: Transformed, args: Sequence[Any], parameters: Mapping[str, Tensor], given: Sequence[Tensor]
    ) -> tuple[Verdict, str]:
        size = graph.size_of(args)
        held = held_inputs(args, size, graph.dims, graph.facts.packed)
        change = chosen(held, size, min(2, self._units(size) - 1))
        if change is None:
            return Verdict.SKIPPED, ""
        steps = _Steps(graph, args, self.quantities, parameters, given, size, change)
        other = steps.altered(held)
        if other is None:
            return Verdict.SKIPPED, ""
        before = steps.run(steps.inputs())
        after = self._after(steps, other, held)
        if not any(largest(rows.values) for rows in before):
            return Verdict.SKIPPED, ""
        seen = moved(before, after, graph.facts.tolerance)
        if seen is None:
            return Verdict.PASSED, ""
        return Verdict.MIXED, f"{steps.changed()} new values in the first batch, and {seen}"


    def _after(self, steps: _Steps, inputs: Sequence[Any], held: Mapping[int, Held]) -> list[Rows]:
        """The second step; integers may have to keep an order (sorted lengths): then floating inputs change alone."""
        try:
            return steps.run(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            floating = {i: one for i, one in held.items() if one.value.is_floating_point()}
            fewer = steps.altered(floating) if len(floating) < len(held) else None
            if fewer is not None:
                return self._after(steps, fewer, floating)
            raise OptionError(
                f"the model raises {type(error).__name__} where {steps.changed()} another sample's values: {error}",
                advice="Pass check_first_batch=False, and use fxgrad.verify.",
            ) from error


def _mixed(seen: str | None) -> MixedSamples:
    return MixedSamples(
        f"samples influence each other: {seen or 'the first batch of another process shows it'}",
        advice="fxgrad.verify(model, x) says more. Look at ops that were registered with register_op, at "
        "numbers taken out of tensors (.item()), and at losses divided by a count over the batch.",
    )


@dataclass
class _Steps:
    """Forwards and backwards of one compiled graph whose results are for the check alone."""

    graph: Transformed
    args: Sequence[Any]
    quantities: Sequence[Quantity]
    parameters: Mapping[str, Tensor]
    given: Sequence[Tensor]
    size: int
    change: Change

    def __post_init__(self) -> None:
        self.scales: dict[int, Tensor] = {}  # of each output, in the first step

    def changed(self) -> str:
        first, *rest = sorted(self.change.samples)
        return f"samples {first} and {rest[0]} have" if rest else f"sample {first} has"

    def inputs(self) -> list[Any]:
        """The graph's inputs in memory of their own, but for parameters that it only reads."""
        written = self.graph.facts.written
        own = {
            i: arg
            for i, arg in enumerate(self.args)
            if isinstance(arg, Tensor) and (i in written or not isinstance(arg, nn.Parameter))
        }
        made = copies(own, written)
        trainable = {i: self.args[i].detach() for i in self.graph.trainable}
        return [made.get(i, trainable.get(i, arg)) for i, arg in enumerate(self.args)]

    def altered(self, held: Mapping[int, Held]) -> list[Any] | None:
        """The same with new values of the changed samples; None where no number differs."""
        made = self.inputs()
        return made if any([one.put(made[i], self.change) for i, one in held.items()]) else None

    def run(self, inputs: Sequence[Any]) -> list[Rows]:
        """Results of the samples that are not changed."""
        asked = [sample_dims(q, q.units(self.size), self.parameters) for q in self.quantities]
        ghosts = [_ghost(one) for deliveries in asked for one, _ in deliveries]
        with _undisturbed(self.args):
            outputs = self.graph.compiled(*inputs, *ghosts, *self.given)
            taken = [
                (i, y)
                for i, y in enumerate(outputs)
                if isinstance(y, Tensor) and y.requires_grad and i not in self.graph.uniform
            ]
            if not taken:
                return []
            with torch.autocast(_device(self.parameters).type, enabled=False):  # where users call backward
                grads = [self._gradient(i, y.detach()) for i, y in taken]
                results = torch.autograd.grad([y for _, y in taken], ghosts, grads, allow_unused=True)
        of = [(q, *one) for q, deliveries in zip(self.quantities, asked, strict=True) for one in deliveries]
        found = [(*one, grad) for one, grad in zip(of, results, strict=True)]
        return [self._rows(q, one, dims, grad) for q, one, dims, grad in found if dims and grad is not None]

    def _gradient(self, i: int, y: Tensor) -> Tensor:
        """See Note [What the two steps can see]."""
        real = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
        wide_y = real.to(accumulating(real.dtype))
        if not y.dim():
            return torch.ones_like(y)
        layout = self.graph.facts.batched.get(i)
        r = _varied(wide_y, layout.dim if layout is not None and layout.merged else None)
        if layout is not None:
            if i not in self.scales:
                finite = torch.where(wide_y.isfinite(), wide_y, 0)
                self.scales[i] = finite.square().mean().sqrt().clamp_min(torch.finfo(wide_y.dtype).tiny)
            r = r * (1 + torch.nn.functional.softsign(wide_y / self.scales[i]))
        r = r.to(real.dtype)
        return torch.view_as_complex(r) if y.is_complex() else r

    def _rows(self, quantity: Quantity, delivery: Delivery, dims: list[int], grad: Tensor) -> Rows:
        n, changed = quantity.units(self.size), {i // quantity.group_size for i in self.change.samples}
        kept = [i for i in range(n) if i not in changed]
        index = torch.tensor(kept, device=grad.device)
        rows = grad.detach()
        for dim in dims:
            rows = rows.index_select(dim, index)
        rows = rows.movedim(dims[0], 0).flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
        place = delivery.place if delivery.place == RESULT else f"{delivery.place} of '{delivery.parameter}'"
        label = f"the {place} of {quantity}" if delivery.place == RESULT else place
        return Rows(label, kept, None if delivery.place == RESULT else delivery.place, sketch(rows))


def _ghost(one: Delivery) -> Tensor:
    ghost = torch.empty_strided(one.shape, (0,) * len(one.shape), dtype=one.dtype, device=one.device)
    return ghost.requires_grad_()


def _varied(y: Tensor, constant: int | None) -> Tensor:
    """A number for each element, by its indices alone; see Note [What the two steps can see]."""
    r = y.new_ones(())
    for d, size in enumerate(y.shape):
        if d != constant:
            by_index = torch.arange(size, dtype=y.dtype, device=y.device).mul(1.7).add(d).cos() + (1.5 if d == 0 else 0)
            r = r * by_index.view(-1, *[1] * (y.dim() - 1 - d))
    return r.expand(y.shape)


def _device(parameters: Mapping[str, Tensor]) -> torch.device:
    return next(iter(parameters.values())).device


@contextlib.contextmanager
def _undisturbed(args: Sequence[Any]) -> Iterator[None]:
    """Keep the random state, and set aside the hooks on saved tensors: a checkpoint around the model counts tensors."""
    devices = {arg.device.index for arg in args if isinstance(arg, Tensor) and arg.is_cuda}
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
