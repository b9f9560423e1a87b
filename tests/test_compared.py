"""What a backward compares for equality has the forward's bits through Inductor, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from tests.quick import long_but

ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax of gelu": lambda h: F.gelu(h).amax(-1),
    "amin of tanh": lambda h: h.tanh().amin(-1),
    "norm of sigmoid": lambda h: torch.linalg.vector_norm(h.sigmoid(), ord=torch.inf, dim=-1),
    "amax of a slice": lambda h: F.gelu(h)[:, 1:6].amax(-1),
    "amax of a permutation": lambda h: F.gelu(h).view(-1, 7, 1).expand(-1, 7, 4).permute(0, 2, 1).amax(-1).sum(-1),
    "aminmax": lambda h: torch.add(*F.gelu(h).aminmax(dim=-1)),
    "the smaller of it and a detached value": lambda h: torch.minimum(
        F.gelu(h), F.gelu(h).topk(2).values[:, -1:].detach()
    ).sum(-1),
    "clamped behind its maximum": lambda h: (F.gelu(h) / F.gelu(h).abs().amax(-1, keepdim=True)).clamp(-1, 1).sum(-1),
    "the largest of each place": lambda h: (
        torch.zeros_like(h)
        .scatter_reduce(1, torch.arange(7, device=h.device).expand_as(h) // 2, F.gelu(h), "amax", include_self=False)
        .sum(-1)
    ),
    "a mask of the model's own": lambda h: (h.tanh() * (h == h.amax(-1, keepdim=True))).sum(-1),
}


class Model(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.scale, self.end = nn.Linear(9, 7), nn.Parameter(torch.tensor(1.5)), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x) * self.scale)


QUICK = ("amax of a slice", "clamped behind its maximum", "a mask of the model's own")


@pytest.mark.inductor
@pytest.mark.parametrize("end", long_but(lambda end: end in QUICK, ENDS))
def test_the_largest_is_found_again(end: str, device: torch.device) -> None:
    """PyTorch's own compiled models have NaN for about half of the rows, or gradients of other elements."""
    torch.manual_seed(29)
    model, x = Model(ENDS[end]).to(device), torch.randn(64, 9, device=device)
    rows = []
    for backend in ("inductor", "aot_eager"):
        fxgrad.zero_grad(model)
        fxgrad.transform(model, backend=backend)(x).sum().backward()
        rows.append([fxgrad.delivered(p) for p in model.parameters()])
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-6)
