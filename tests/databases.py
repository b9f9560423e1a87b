"""PyTorch's own test databases, and what becomes of the models made from their samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxgrad
from fxgrad.ops.calls import op_name
from fxgrad.rules import RULES, Rule
from fxgrad.testing import assert_per_sample_grads, default_loss, per_sample_grads, relative_error
from tests.independence import tensors_of

with mock.patch("torch.backends.disable_global_flags"):  # its import would forbid other tests to set flags
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

__all__ = ["Case", "Report", "Verdict", "entries", "examine", "judge", "module_db", "op_db", "verdict"]

WITHOUT_RULE = """
    __radd__ __rdiv__ __rmul__ __rsub__ add addbmm addcdiv addcmul addmv addr column_stack div gather hstack
    index_select inner kron lerp masked_fill mul nn.functional.bilinear nn.functional.scaled_dot_product_attention
    outer rsub sub take_along_dim tensordot true_divide vstack where
""".split()
"""Ops of several tensors that reach a rule through their family, a decomposition, or the generic one."""


def _rule_of(info: Any) -> Rule | None:
    return RULES.get(op_name(info.name.removeprefix("nn.functional.")))


RULED = {info.name: rule for info in op_db if (rule := _rule_of(info)) is not None}
OF_ONE_TENSOR = {name for name, rule in RULED.items() if rule.differentiates == {"input"}}
CRASHES = {"nn.functional.embedding_bag"}
"""PyTorch's kernel ends the process on offsets outside of the ids, which the search for a batch tries."""
OF_SEVERAL = RULED.keys() - OF_ONE_TENSOR - CRASHES


def entries(*chosen: Collection[str]) -> list[Any]:
    """The ops of these names."""
    return [
        info
        for info in op_db
        if any(info.name in names for names in chosen) and torch.float64 in info.supported_dtypes("cpu")
    ]


IN_EVERY_WAY = entries(OF_SEVERAL, WITHOUT_RULE)
"""Ops of which the ledger has each tensor batched along each of its dims, too."""


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
    no_batch: int = 0  # refused, and rightly so, or not wrong because there is one sample at most
    refused: list[str] = field(default_factory=list)  # though there is a batch
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.right} right, {self.no_batch} without a batch, {len(self.refused)} refused though there is one"


@dataclass(frozen=True)
class Verdict:
    """What became of one case, as a ledger says it, and what is behind it."""

    kind: str
    note: str = ""

    @property
    def fails(self) -> bool:
        return self.kind == "wrong" or self.kind.startswith("crashed:")


def verdict(run: Callable[[], object], *, alone: bool, describe: Callable[[], str]) -> Verdict:
    """The verdict on a check: right, refused:X and, where samples meet, meets:right or meets:X; wrong, crashed:X.

    X is the class of the error. `run` raises AssertionError where a number is wrong.
    """
    try:
        run()
    except fxgrad.FxgradError as error:
        return Verdict(f"{'refused' if alone else 'meets'}:{type(error).__name__}", f"{describe()}: {error.sentence}")
    except AssertionError as error:
        return Verdict("wrong", f"{describe()}: {error}"[:2000])
    except Exception as error:
        sentence = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return Verdict(f"crashed:{type(error).__name__}", f"{describe()}: {sentence}"[:2000])
    return Verdict("right" if alone else "meets:right")


def judge(case: Case, backend: str = "eager") -> Verdict:
    """The verdict on one case; where it has no batch, anything but a refusal is wrong."""
    if case.out_dims is not None:
        return verdict(lambda: case.check(backend=backend), alone=True, describe=case.describe)
    return verdict(lambda: _refused(case, backend), alone=False, describe=case.describe)


def _refused(case: Case, backend: str) -> None:
    assert case.refuse(backend=backend) < 2, "not refused"


def examine(cases: Iterable[Case], backend: str = "eager") -> Report:
    """Runs every case; what is neither right nor refused with an error of fxgrad's own is listed in `wrong`."""
    report = Report()
    for case in cases:
        found = judge(case, backend)
        if found.fails:
            report.wrong.append(found.note)
        elif case.out_dims is None:
            report.no_batch += 1
        elif found.kind == "right":
            report.right += 1
        else:
            report.refused.append(found.note)
    torch._dynamo.reset()
    return report
