"""The check of the first batch: fxgrad changes two samples, and the results of no other sample may change.

fxgrad runs two steps on the compiled graph before the user's forward: one on the original batch, one with two samples
changed. Both start from the same random state, on copies of the inputs and buffers. Their results are gradients by
placeholders that lead to no parameter, so nothing is delivered, counted or added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxgrad.capture.distributed import group_around, largest_of_all
from fxgrad.errors import MixedSamples, OptionError
from fxgrad.first_batch.changes import BatchedInput, batched_inputs, chosen
from fxgrad.first_batch.compared_rows import Rows, largest, moved, sketch
from fxgrad.first_batch.step import Step, device_of
from fxgrad.quantities import RESULT, Delivery, Quantity

if TYPE_CHECKING:
    from fxgrad.compile.transformed import Transformed


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
        return not largest_of_all(int(too_few), self._agreeing, device_of(parameters))

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
            agreed = largest_of_all(verdict, self._agreeing, device_of(parameters))
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
class _TwoSteps(Step):
    """The two forwards and backwards of one compiled graph, and their comparison."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.size
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

    def altered(self, batched: Mapping[int, BatchedInput]) -> list[Any] | None:
        """Copy the inputs with new values of the changed samples; return None if no number differs."""
        new = self.inputs()
        return new if any([one.put(new[i], self.change) for i, one in batched.items()]) else None

    def run(self, inputs: Sequence[Any]) -> list[Rows]:
        """Run a step and return the results of the unchanged samples."""
        pairs = zip(self.asked, self.results(inputs), strict=True)
        return [self._rows(*one, result) for one, result in pairs if one[-1] and result is not None]

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
