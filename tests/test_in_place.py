"""Ops that write over what an earlier use of a parameter read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.w, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(nn.functional.linear(x, self.w), self.w, self.b)


def sum_then_scaled(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    later = h + b
    return h.mul_(b) + later


def product_then_written_through_a_view(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    later = h + b
    h[:, :2].mul_(2)
    h.view(-1).add_(1)
    return h + later


def twice_in_place(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return h.add_(b).mul_(w[:, 0]).add_(b)


def relu_between(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    later = h + b
    return h.relu_() + later.add_(h).relu_()


def augmented(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    later = h - b
    h *= b
    h += later
    return h


BODIES = [sum_then_scaled, product_then_written_through_a_view, twice_in_place, relu_between, augmented]


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_use_before_an_in_place_op(
    body: Callable[[Tensor, Tensor, Tensor], Tensor], backend: str, device: torch.device
) -> None:
    model, x = Model(body).double().to(device), torch.randn(5, 3, dtype=torch.double, device=device)
    assert_per_sample_grads(model, x, backend=backend)
