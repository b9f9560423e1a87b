"""The check of the first batch: fxgrad changes two samples, and the results of no other sample may change.

fxgrad runs two steps on the compiled graph before the user's forward: one on the original batch, one with two samples
changed. Both start from the same random state, on copies of the inputs and buffers. Their results are gradients by
placeholders that lead to no parameter, so nothing is delivered, counted or added.

Note [What the two steps can see]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The user's loss is outside the model, so fxgrad gives each output a gradient. If row i of an output belongs to sample i,
the gradient is r (1 + softsign(y / rms)). It has to depend on y: under a constant gradient, the per-sample gradients of
the layer before ``y - y.mean(0)`` would not change, and under a user's loss they do. softsign never increases a
relative error of y. An output that sums over samples gets only r, since a loss inside the model is linear in it.

r varies between elements and depends only on each index. Changed lengths may make an output longer, and the elements of
sample i have to keep their r. Along a dimension with more than the sample index (rows of packed data), r is constant,
because the positions of a sample may change there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxgrad.capture.distributed import group_around, largest_of_all
from fxgrad.capture.shared_memory import copies
from fxgrad.errors import MixedSamples, OptionError
from fxgrad.first_batch.changes import BatchedInput, batched_inputs, chosen
from fxgrad.first_batch.compared_rows import Rows, largest, moved, sketch
from fxgrad.host.autograd import saved_tensors_hooks_aside
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities import RESULT, Delivery, Quantity

if TYPE_CHECKING:
    from fxgrad.compile.compiler import Transformed


class Verdict(IntEnum):
    """The outcome of the check of one batch; several processes agree on the largest."""

    PASSED = 0
    SKIPPED = 1  # nothing to compare or to change; the next batch is checked
    MIXED = 2


def sample_dims(quantity: Quantity, n: int, parameters: Mapping[str, Tensor]) -> list[tuple[Delivery, list[int]]]:
    """Return the deliveries of a quantity, with the dimensions that grow with the batch."""
    deliveries = zip(quantity.deliveries(n, parameters), quantity.deliveries(n + 1, parameters), strict=True)
    return [
        (one, [d for d, pair in enumerate(zip(one.shape, more.shape, strict=True)) if pair[0] != pair[1]])
        for one, more in deliveries
    ]


def check_comparable(quantities: Sequence[Quantity], parameters: Mapping[str, Tensor]) -> None:
    """Raise if no quantity has per-sample results."""
    if parameters and not any(dims for q in quantities for _, dims in sample_dims(q, 2, parameters)):
        raise OptionError(
            f"check_first_batch has nothing to compare: {', '.join(map(str, quantities))} has no result per sample",
            advice="Leave out check_first_batch=, and use fxgrad.verify.",
        )


class FirstBatch:
    """The check of one batch of a model."""

    def __init__(self, quantities: Sequence[Quantity]) -> None:
        self.quantities = quantities
        self.passed = False
        self.settles = False  # whether processes agree in `settle` instead of the model's call
        self._seen: str | None = None  # the finding of this process until they agree
        self._agreeing: Any = None  # the process group of the current call

    def due(self, size: int, parameters: Mapping[str, Tensor]) -> bool:
        """Decide whether every process can check this call's batch; all processes have to ask at the same call."""
        self._agreeing = None if self.settles else group_around()
        too_few = _units(self.quantities, size) < 2
        return not largest_of_all(int(too_few), self._agreeing, _device(parameters))

    def check(
        self, graph: Transformed, args: Sequence[Any], parameters: Mapping[str, Tensor], weights: Sequence[Tensor]
    ) -> None:
        """Run the two steps and compare them.

        Raises:
            MixedSamples: results of other samples changed, in this process or in another one.
        """
        verdict, seen = Verdict.SKIPPED, ""
        try:
            verdict, seen = _TwoSteps(graph, args, self.quantities, parameters, weights).outcome()
        finally:  # otherwise the others would wait for a failed process
            agreed = largest_of_all(verdict, self._agreeing, _device(parameters))
        if agreed == Verdict.MIXED and self.settles:
            self._seen = seen
        elif agreed == Verdict.MIXED:
            raise _mixed(seen)
        self.passed = agreed != Verdict.SKIPPED

    def settle(self, group: Any, device: torch.device) -> bool:
        """Agree with the other processes, once per step; return whether all of them have passed.

        Raises:
            MixedSamples: in every process, if one saw a change in another sample's results.
        """
        verdict = Verdict.SKIPPED if not self.passed else Verdict.PASSED if self._seen is None else Verdict.MIXED
        agreed = largest_of_all(verdict, group, device)
        if agreed == Verdict.MIXED:
            raise _mixed(self._seen)
        return agreed == Verdict.PASSED


def _units(quantities: Sequence[Quantity], size: int) -> int:
    """Return the least number of samples that a quantity divides the batch into."""
    return int(min(quantity.units(size) for quantity in quantities))


def _mixed(seen: str | None) -> MixedSamples:
    return MixedSamples(
        f"samples influence each other: {seen or 'the first batch of another process shows it'}",
        advice="fxgrad.verify(model, x) says more. Look at ops that were registered with register_op, at "
        "numbers taken out of tensors (.item()), and at losses divided by a count over the batch.",
    )


@dataclass
class _TwoSteps:
    """The two forwards and backwards of one compiled graph, and their comparison."""

    graph: Transformed
    args: Sequence[Any]
    quantities: Sequence[Quantity]
    parameters: Mapping[str, Tensor]
    weights: Sequence[Tensor]  # the inputs that quantities add, such as sample weights

    def __post_init__(self) -> None:
        self.scales: dict[int, Tensor] = {}  # the rms of each output in the first step
        size = self.graph.size_of(self.args)
        self.batched = batched_inputs(self.args, size, self.graph.interface.dims, self.graph.interface.packed)
        self.change = chosen(self.batched, size, min(2, _units(self.quantities, size) - 1))
        self.asked = [
            (q, q.units(size), *one) for q in self.quantities for one in sample_dims(q, q.units(size), self.parameters)
        ]

    def outcome(self) -> tuple[Verdict, str]:
        """Run the two steps and compare them; describe the results of other samples that changed."""
        inputs = self.altered(self.batched)
        if inputs is None:
            return Verdict.SKIPPED, ""
        before = self.run(self.inputs())
        after = self._after(inputs, self.batched)
        if not any(largest(rows.values) for rows in before):
            return Verdict.SKIPPED, ""
        seen = moved(before, after, self.graph.interface.tolerance)
        if seen is None:
            return Verdict.PASSED, ""
        return Verdict.MIXED, f"{self.changed()} new values in the first batch, and {seen}"

    def _after(self, inputs: Sequence[Any], batched: Mapping[int, BatchedInput]) -> list[Rows]:
        """Run the second step; if integers must keep an order (sorted lengths), change only floating inputs."""
        try:
            return self.run(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            floating = {i: one for i, one in batched.items() if one.value.is_floating_point()}
            fewer = self.altered(floating) if len(floating) < len(batched) else None
            if fewer is not None:
                return self._after(fewer, floating)
            raise OptionError(
                f"the model raises {type(error).__name__} where {self.changed()} another sample's values: {error}",
                advice="Pass check_first_batch=False, and use fxgrad.verify.",
            ) from error

    def changed(self) -> str:
        first, *rest = sorted(self.change.samples)
        return f"samples {first} and {rest[0]} have" if rest else f"sample {first} has"

    def inputs(self) -> list[Any]:
        """Copy the graph's inputs, except parameters that it only reads."""
        writes = self.graph.interface.writes
        written = () if writes is None else writes.by_input
        copied = {
            i: arg
            for i, arg in enumerate(self.args)
            if isinstance(arg, Tensor) and (i in written or not isinstance(arg, nn.Parameter))
        }
        new = {i: self.args[i].detach() for i in self.graph.interface.trainable.values()} | copies(copied, written)
        return [new.get(i, arg) for i, arg in enumerate(self.args)]

    def altered(self, batched: Mapping[int, BatchedInput]) -> list[Any] | None:
        """Copy the inputs with new values of the changed samples; return None if no number differs."""
        new = self.inputs()
        return new if any([one.put(new[i], self.change) for i, one in batched.items()]) else None

    def run(self, inputs: Sequence[Any]) -> list[Rows]:
        """Run a step and return the results of the unchanged samples."""
        placeholders = [_placeholder(delivery) for _, _, delivery, _ in self.asked]
        with _undisturbed(self.args):
            outputs = enumerate(self.graph.compiled(*inputs, *placeholders, *self.weights))
            real = [(i, y) for i, y in outputs if isinstance(y, Tensor) and y.requires_grad]
            taken = {i: y for i, y in real if i not in self.graph.interface.uniform}
            if not taken:
                return []
            with torch.autocast(_device(self.parameters).type, enabled=False):  # as in the user's backward
                grads = [self._gradient(i, y.detach()) for i, y in taken.items()]
                results = torch.autograd.grad(list(taken.values()), placeholders, grads, allow_unused=True)
        pairs = zip(self.asked, results, strict=True)
        return [self._rows(*one, result) for one, result in pairs if one[-1] and result is not None]

    def _gradient(self, i: int, y: Tensor) -> Tensor:
        """Return the gradient of an output. See Note [What the two steps can see]."""
        real = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
        wide_y = real.to(accumulating(real.dtype))
        if not y.dim():
            return torch.ones_like(y)
        layout = self.graph.interface.batched.get(i)
        r = _varied(wide_y, layout.dim if layout is not None and layout.merged else None)
        if layout is not None:
            if i not in self.scales:
                finite = torch.where(wide_y.isfinite(), wide_y, 0)
                self.scales[i] = finite.square().mean().sqrt().clamp_min(torch.finfo(wide_y.dtype).tiny)
            r = r * (1 + torch.nn.functional.softsign(wide_y / self.scales[i]))
        r = r.to(real.dtype)
        return torch.view_as_complex(r) if y.is_complex() else r

    def _rows(self, quantity: Quantity, n: int, delivery: Delivery, dims: list[int], grad: Tensor) -> Rows:
        """Return the results of the unchanged samples, one a row."""
        changed = {i // quantity.group_size for i in self.change.samples}
        kept = [i for i in range(n) if i not in changed]
        index = torch.tensor(kept, device=grad.device)
        rows = grad.detach()
        for dim in dims:
            rows = rows.index_select(dim, index)
        rows = rows.movedim(dims[0], 0).flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
        if delivery.place == RESULT:
            return Rows(f"the {RESULT} of {quantity}", kept, None, sketch(rows))
        return Rows(f"{delivery.place} of '{delivery.parameter}'", kept, delivery.place, sketch(rows))


def _placeholder(spec: Delivery) -> Tensor:
    strides = (0,) * len(spec.shape)
    return torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=spec.device, requires_grad=True)


def _varied(y: Tensor, constant: int | None) -> Tensor:
    """Return a number per element, a function of its indices. See Note [What the two steps can see]."""
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
    """Preserve the random state and remove saved-tensor hooks: a checkpoint around the model counts tensors."""
    devices = {arg.device.index for arg in args if isinstance(arg, Tensor) and arg.is_cuda}
    with saved_tensors_hooks_aside(), torch.random.fork_rng(sorted(devices)):
        yield
