"""What a model reads of a buffer or an input before it writes into it, its backward reads, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxgrad.testing import assert_per_sample_grads
from tests.quick import long_but


class Model(nn.Module):
    b: Tensor

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(3, 4), read
        self.register_buffer("b", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Any:
        old = self.read(self.b)
        h = self.layer(x) * old
        with torch.no_grad():
            self.b.mul_(0.9).add_(1.0)
        return h * self.b


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "a copy": torch.clone,
    "a product with 1": lambda b: b * 1.0,
    "a cast and back": lambda b: b.float().to(b.dtype),
    "a function": torch.sin,
}


@pytest.mark.parametrize(
    ("name", "backend"),
    long_but(
        lambda name, backend: backend == "aot_eager" or name == "a copy",
        [(name, backend) for name in READS for backend in ("aot_eager", "inductor")],
    ),
)
def test_a_buffer(name: str, backend: str, device: torch.device) -> None:
    """A plain compiled model has wrong gradients there: its backward reads what the forward has written."""
    model = Model(READS[name]).double().to(device)
    assert_per_sample_grads(model, torch.randn(5, 3, dtype=torch.float64, device=device), backend=backend)


class OfInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x.clone())
        x.mul_(2.0)
        return h


@pytest.mark.inductor
def test_an_input(device: torch.device) -> None:
    model = OfInput().double().to(device)
    assert_per_sample_grads(model, torch.randn(5, 3, dtype=torch.float64, device=device), backend="inductor")
