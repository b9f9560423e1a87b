"""Random numbers and parameters: dropout of a parameter, attention with dropout and a parameter in its mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.kernels.generic import _PROGRAMS, SampleProgram
from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED

B, T, E = 3, 4, 6


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(shape, dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def attend(x: Tensor, mask: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 3)).transpose(-2, -3)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.4).flatten(-2)


def attend_in_windows(x: Tensor, mask: Tensor) -> Tensor:
    """Two windows of every sample, the samples in the middle of a dim."""
    windows = x.unflatten(1, (2, 2)).transpose(0, 1).flatten(0, 1)
    return attend(windows, mask).unflatten(0, (2, -1)).transpose(0, 1)


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "a parameter": (lambda x, w: x * F.dropout(w, 0.4), (T, E)),
    "a function of a parameter": (lambda x, w: x @ F.dropout(w.t().exp(), 0.4) + w.sum(), (5, E)),
    "torch.dropout": (lambda x, w: x * torch.dropout(w, 0.4, True), (T, E)),
    "channels of a parameter": (lambda x, w: x * F.dropout1d(w, 0.4), (T, E)),
    "a parameter and samples": (lambda x, w: F.dropout(F.dropout(x, 0.3) * F.dropout(w, 0.4), 0.2), (T, E)),
    "a mask of attention": (attend, (2, T, T)),
    "a mask of more dims": (attend, (1, 1, T, T)),
    "a mask for all heads": (attend, (T, T)),
    "a mask of windows": (attend_in_windows, (2, 2, 2)),
    "learned keys": (lambda x, w: F.scaled_dot_product_attention(x, w, w, dropout_p=0.4), (5, E)),
}


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("name", CASES)
def test_drawn_once(name: str, backend: str) -> None:
    """The forward draws what the plain model draws, and the backward draws nothing."""
    function, shape = CASES[name]
    assert_per_sample_grads(Model(function, *shape), torch.randn(B, T, E, dtype=torch.float64), backend=backend, seed=1)


def test_a_parameter_without_drawing_stays_whole() -> None:
    model = Model(lambda x, w: x * F.dropout(w, 0.4, training=False), T, E)
    assert "ones_like" not in str(fxgrad.trace(model, torch.randn(B, T, E, dtype=torch.float64)))


def test_the_generic_rule_draws_nothing() -> None:
    program = SampleProgram("draws", lambda values: (values[0] * values[1] * torch.rand_like(values[1]),), (0,), (1,))
    with pytest.raises(RuntimeError, match="draws random numbers, which no backward can repeat: draws"):
        program.vjp([torch.randn(B, E), torch.randn(E)], [1], [torch.ones(B, E)])


def test_programs_of_one_key_are_one_entry() -> None:
    def product(values: list[Any]) -> tuple[Tensor, ...]:
        return (values[0] * values[1] * values[2],)

    x, w, g = torch.randn(B, E), torch.randn(E), torch.ones(B, E)
    for _ in range(2):  # the same model, compiled again
        (grad,) = SampleProgram("a product", product, (0,), (1,), (2,)).vjp([x, w, 3], [1], [g])
        torch.testing.assert_close(grad, 3 * x)
    (grad,) = SampleProgram("a product", product, (0,), (2,), (1,)).vjp([x, 3, w], [2], [g])  # w where 3 was
    torch.testing.assert_close(grad, 3 * x)
    assert sum("a product" in key for key in _PROGRAMS) == 2
