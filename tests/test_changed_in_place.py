"""Weights written without gradients and shapes changed in place, and what names a value from before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fxgrad
from fxgrad.errors import GraphBreak
from fxgrad.testing import assert_per_sample_grads
from tests.test_assignments import Model


@pytest.mark.parametrize("size", [1, 5])
def test_views_of_a_weight_that_is_written(size: int, device: torch.device) -> None:
    """At a batch of one as at any other: what a view shows after the write, with its gradient."""

    def written(m: Model, x: Tensor) -> Tensor:
        flat, row = m.w.view(-1), m.w[:2]
        y = x @ m.w.t()
        with torch.no_grad():
            m.w.clamp_(-0.5, 0.5)
        return y + (x * row[1]).sum(1, keepdim=True) * flat[:4] + m.b

    model, x = Model(written).double().to(device), torch.randn(size, 3, dtype=torch.double, device=device)
    plain = copy.deepcopy(model)
    with torch.no_grad():  # clamped already: the loop and the plain model write the same values again
        plain.w.clamp_(-0.5, 0.5)
        model.w.clamp_(-0.5, 0.5)
    assert_per_sample_grads(model, x, backend="eager")
    torch.testing.assert_close(fxgrad.transform(model, backend="eager")(x), plain(x))


def test_a_view_is_written_at_a_batch_of_one(device: torch.device) -> None:
    def written(m: Model, x: Tensor) -> Tensor:
        flat, row = m.w.view(-1), m.w[:2]
        with torch.no_grad():
            m.w[0].clamp_(-0.1, 0.1)
        y = x * row[1] + row.sum()
        with torch.no_grad():
            flat.mul_(2)
        return y @ m.w.t() * m.b + flat.sum()

    model, x = Model(written).double().to(device), torch.randn(1, 3, dtype=torch.double, device=device)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    fxgrad.transform(model, backend="eager")(x).square().sum().backward()
    for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad_sample[0], theirs.grad)  # type: ignore[attr-defined]
    torch.testing.assert_close(model.w, plain.w)


def test_a_part_of_a_function_of_a_weight_is_written(device: torch.device) -> None:
    def written(m: Model, x: Tensor) -> Tensor:
        u = m.w * 2
        u[1:3].mul_(m.b[0])
        u[:, 1].sin_()
        return x @ u.t()

    x = torch.randn(5, 3, dtype=torch.double, device=device)
    assert_per_sample_grads(Model(written).double().to(device), x, backend="eager")


@pytest.mark.parametrize("size", [1, 5])
def test_a_shape_changed_under_two_names(size: int, device: torch.device) -> None:
    def two(m: Model, x: Tensor) -> Tensor:
        h = m.linear(x)
        same = h.contiguous()
        h.unsqueeze_(1)
        return h * m.b + same.sum(1, keepdim=True)

    x = torch.randn(size, 3, dtype=torch.double, device=device)
    assert_per_sample_grads(Model(two).double().to(device), x, backend="eager")


def test_an_op_that_dynamo_cannot_follow(device: torch.device) -> None:
    """addbmm_ makes a 0-dim tensor larger; PyTorch's fake tensors do not."""
    batches = torch.randn(2, 3, 4, device=device)

    def grown(m: Model, x: Tensor) -> Tensor:
        return m.linear(x) * m.b[0].clone().addbmm_(batches, batches.mT).sum()

    gs = fxgrad.transform(Model(grown).to(device), backend="eager")
    with pytest.raises(GraphBreak, match="TorchDynamo cannot follow addbmm_: expand") as raised:
        gs(torch.randn(5, 3, device=device))
    assert "in grown" in str(raised.value) or "addbmm_(batches" in str(raised.value)
    assert "Write it with another op" in str(raised.value)
