"""Random numbers and parameters: dropout of a parameter, attention with dropout and a parameter in its mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.kernels.generic import per_sample_vjp, register_program
from fxgrad.testing import assert_per_sample_grads

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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_drawn_once(name: str, backend: str) -> None:
    """The forward draws what the plain model draws, and the backward draws nothing."""
    function, shape = CASES[name]
    assert_per_sample_grads(Model(function, *shape), torch.randn(B, T, E, dtype=torch.float64), backend=backend, seed=1)


def test_a_parameter_without_drawing_stays_whole() -> None:
    model = Model(lambda x, w: x * F.dropout(w, 0.4, training=False), T, E)
    assert "ones_like" not in str(fxgrad.trace(model, torch.randn(B, T, E, dtype=torch.float64)))


def test_the_generic_rule_draws_nothing() -> None:
    register_program("draws", lambda batched, shared, sizes: (batched[0] * shared[0] * torch.rand_like(shared[0]),))
    with pytest.raises(RuntimeError, match="draws random numbers, which no backward can repeat: draws"):
        per_sample_vjp("draws", [torch.ones(B, E)], [torch.randn(B, E)], [torch.randn(E)], [0], [])
