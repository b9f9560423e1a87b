"""PyTorch's own test databases, and what becomes of the models made from their samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxgrad
from fxgrad.testing import assert_per_sample_grads, default_loss, per_sample_grads, relative_error
from tests.independence import tensors_of

with mock.patch("torch.backends.disable_global_flags"):  # its import would forbid other tests to set flags
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

__all__ = ["Case", "Report", "examine", "module_db", "op_db"]


@dataclass(frozen=True)
class Case:
    """A model, its batched inputs, and where the samples are in them and in its outputs."""

    name: str
    model: nn.Module
    inputs: tuple[Any, ...]
    in_dims: tuple[int | None, ...] | None
    out_dims: list[int | str] | None  # None: no batch exists, the case must be refused
    natural: bool = True  # the first of the ways in which this tensor of the sample can be batched
    tolerance: float | None = None  # None: that of the parameters' dtype
    summed: nn.Module | None = None  # where out_dims say "share": the same model with a sum in place of the mean

    def describe(self) -> str:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in self.inputs]
        source = getattr(self.model, "source", " ".join(str(self.model).split())[:200])
        return f"{self.name}: {source}, inputs {shapes}, in_dims {self.in_dims}"

    def check(self, **options: Any) -> float:
        """`fxgrad.testing.assert_per_sample_grads` of this case."""
        if self.summed is not None:
            return self._check_shares(**options)
        if self.out_dims and "mean" in self.out_dims:
            options = {"options": {"loss_reduction": "mean"}, **options, "check_sum": False}
        return assert_per_sample_grads(
            self.model, *self.inputs, loss_fn=self.loss_fn, in_dims=self.in_dims, tolerance=self.tolerance, **options
        )

    def _check_shares(self, **options: Any) -> float:
        """A mean whose weights differ: a sample's gradient is that of its share, L_n / Σ_m w_m, of the batch's mean."""
        assert self.summed is not None
        by_sum = per_sample_grads(self.summed, self.loss_fn, self.inputs, in_dims=self.in_dims)
        factor = (self.model(*self.inputs) / self.summed(*self.inputs)).detach()
        transformed = fxgrad.transform(self.model, in_dims=self.in_dims, **options)
        try:
            self.loss_fn(transformed(*self.inputs)).backward()
            parameters: dict[str, Any] = dict(self.model.named_parameters())
            found = {name: p.grad_sample for name, p in parameters.items()}
        finally:
            fxgrad.zero_grad(self.model)
        error = relative_error(found, {name: g * factor for name, g in by_sum.items()})
        assert error <= 1e-10, f"grad_sample is off by {error:.2e}"
        return error

    def refuse(self, **options: Any) -> int:
        """Runs forward and backward where no batch exists; the number of samples, if nothing raised.

        One sample, or none, cannot meet others: then the right result is as good as a refusal.
        """
        pairs = zip(self.inputs, self.in_dims or (), strict=False)
        samples = max((int(x.shape[dim]) for x, dim in pairs if dim is not None), default=2)
        if samples < 2:
            self.check(check_sum=False, **options)  # what reaches no sample has no place in grad_sample
            return samples
        transformed = fxgrad.transform(self.model, in_dims=self.in_dims, **options)
        try:
            self.loss_fn(transformed(*self.inputs)).backward()
        finally:
            fxgrad.zero_grad(self.model)
        return samples

    def with_input_gradients(self, wanted: bool) -> Case:
        """The same case with floating inputs that do, or do not, require grad."""
        return replace(self, inputs=pytree.tree_map_only(Tensor, lambda x: _leaf(x, wanted), self.inputs))

    def loss_fn(self, output: Any) -> Tensor:
        """`fxgrad.testing.default_loss` with the samples along `out_dims`."""
        tensors = tensors_of(output)
        if self.out_dims is not None:
            pairs = zip(tensors, self.out_dims, strict=True)
            tensors = [y.movedim(dim, 0) if isinstance(dim, int) else y for y, dim in pairs]
        return default_loss(tensors)


def _leaf(x: Tensor, requires_grad: bool) -> Tensor:
    return x.detach().requires_grad_(requires_grad and x.is_floating_point())


@dataclass
class Report:
    """What became of many cases."""

    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # reason -> how many that have a batch
    no_batch: int = 0  # refused, and rightly so, or not wrong because there is one sample at most
    wrong: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)  # of the refusals

    def __str__(self) -> str:
        refused = ", ".join(f"{why} ({n})" for why, n in sorted(self.refused.items())) or "none"
        return f"{self.right} right, {self.no_batch} without a batch refused, refused though there is one: {refused}"


def reason(error: fxgrad.FxgradError) -> str:
    """What follows the colon in the error's sentence, without numbers and what stands in brackets."""
    clause = error.sentence.splitlines()[0].split(": ", 1)[-1]
    return re.sub(r"\b[su]?\d+\b", "#", re.split(r"[(.]", clause)[0])[:80].strip()


def examine(cases: Iterable[Case], backend: str = "eager") -> Report:
    """Runs every case; what is neither right nor refused with an error of fxgrad's own is listed in `wrong`."""
    report = Report()
    for case in cases:
        try:
            if case.out_dims is None:
                if case.refuse(backend=backend) > 1:
                    report.wrong.append(f"{case.describe()}: not refused")
                report.no_batch += 1
            else:
                case.check(backend=backend)
                report.right += 1
        except fxgrad.FxgradError as error:
            if case.out_dims is None:
                report.no_batch += 1
            else:
                report.refused[reason(error)] += 1
                report.sentences.append(f"{case.describe()}: {error.sentence}")
        except Exception as error:
            sentence = str(error).strip().splitlines()[0] if str(error).strip() else ""
            report.wrong.append(f"{case.describe()}: {type(error).__name__}: {sentence}")
    torch._dynamo.reset()
    return report
