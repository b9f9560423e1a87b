"""Forwards that once crashed, or were refused without need: each sample's gradient, by the loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad

LOG = logging.getLogger(__name__)


@lru_cache(None)
def _once(self: Any, *args: Any) -> None:
    """As Hugging Face does it."""
    self.warning(*args)


class Model(nn.Module):
    def __init__(self, program: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.program = nn.Linear(3, 3), program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer, x)


def normalised_by_its_shape(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    return F.layer_norm(h, h.shape[1:]).sin()


def warned(m: Any, x: Tensor) -> Tensor:
    warnings.warn("a model's own", stacklevel=2)
    return m(x)


def printed(m: Any, x: Tensor) -> Tensor:
    print("a model's own", x.shape)
    return m(x)


def logged(m: Any, x: Tensor) -> Tensor:
    LOG.warning("a model's own %s", x.shape)
    LOG.info("another")
    return m(x)


def logged_once(m: Any, x: Tensor) -> Tensor:
    LOG.warning_once("a model's own")  # type: ignore[attr-defined]
    return m(x)


def rows_alike(model: Any, x: Tensor, quantity: Any) -> None:
    view = fxgrad.transform(model, quantity=quantity, backend="eager")
    fxgrad.zero_grad(view)
    view(x).square().sum().backward()
    for name, p in model.named_parameters():
        rows = []
        for i in range(len(x)):
            loss = model(x[i : i + 1]).square().sum()
            rows.append(torch.autograd.grad(loss, dict(model.named_parameters())[name])[0])
        if isinstance(quantity, fxgrad.GradSample):
            torch.testing.assert_close(p.grad_sample, torch.stack(rows))
        else:
            torch.testing.assert_close(p.grad, torch.stack(rows).sum(0))


@pytest.mark.parametrize("program", [warned, printed, logged, logged_once])
def test_messages(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", _once, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows_alike(Model(program), torch.randn(4, 3), fxgrad.GradSample())


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.ClippedGrad(1e6)], ids=str)
def test_a_shape_to_normalise_at_several_lengths(quantity: Any) -> None:
    model = Model(normalised_by_its_shape)
    for length in (4, 5, 7):
        for p in model.parameters():
            p.grad = None
        rows_alike(model, torch.randn(6, length, 3), quantity)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.ClippedGrad(1e6)], ids=str)
def test_vmap_over_samples(quantity: Any, size: int) -> None:
    model = Model(lambda m, x: torch.vmap(lambda z: torch.tanh(m.weight @ z + m.bias))(x))
    rows_alike(model, torch.randn(size, 3), quantity)


def test_bags_of_a_sparse_table() -> None:
    bags, ids = nn.EmbeddingBag(7, 3, sparse=True), torch.randint(7, (5, 4))
    fxgrad.transform(bags, backend="eager")(ids).square().sum().backward()
    found: Any = bags.weight
    for i in range(5):
        (row,) = torch.autograd.grad(bags(ids[i : i + 1]).square().sum(), bags.weight)
        torch.testing.assert_close(found.grad_sample[i], row.to_dense())


def test_one_by_one_is_refused_at_once() -> None:
    """PyTorch would unroll it for the thousands of samples that stand in for any number."""
    view = fxgrad.transform(Model(lambda m, x: torch.stack([m(row) for row in x.unbind(0)])), backend="eager")
    with pytest.raises(fxgrad.errors.FxgradError, match="unbind fixes the batch size") as raised:
        view(torch.randn(6, 3))
    assert "torch.vmap" in str(raised.value)


def summed_over_processes(m: Any, x: Tensor) -> Tensor:
    return m(x) / functional.all_reduce(x.abs().sum(), "sum", [0])


def written_over_processes(m: Any, x: Tensor) -> Tensor:
    total = x.abs().sum()
    dist.all_reduce(total)
    return m(x) / total


def gathered(m: Any, x: Tensor) -> Tensor:
    return functional.all_gather_tensor(m(x), 0, [0])


@pytest.mark.parametrize("mixing", ["error", "allow"])
@pytest.mark.parametrize("program", [summed_over_processes, written_over_processes, gathered])
def test_collectives_in_the_model_are_refused(program: Any, mixing: Any, tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        view = fxgrad.transform(Model(program), backend="eager", mixing=mixing)
        with pytest.raises(fxgrad.errors.MixedSamples, match="brings in other processes' samples"):
            view(torch.randn(4, 3))
    finally:
        dist.destroy_process_group()
