"""Products on oneDNN against float64, in each form that their shapes choose."""

from __future__ import annotations

import pytest
import torch

from fxgrad.kernels import onednn


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("m", "o", "i"),
    [(5, 4, 3), (300, 40, 200), (300, 200, 40), (1500, 64, 32), (1100, 70, 33)],
    ids=["small", "few outputs", "few rows", "many rows", "some outputs at a time"],
)
def test_outer_products(monkeypatch: pytest.MonkeyPatch, m: int, o: int, i: int, weights: bool) -> None:
    monkeypatch.setattr(onednn, "FEW", 1000)
    monkeypatch.setattr(onednn, "WIDE", 65)
    monkeypatch.setattr(onednn, "PART", 32)
    g, x, c = torch.randn(o, m).t(), torch.randn(m, i), torch.rand(m) if weights else None
    weighted = g.double() if c is None else g.double() * c.double().unsqueeze(1)
    found = onednn.outer_products(g, x, c)
    torch.testing.assert_close(found.double(), weighted.t() @ x.double(), rtol=1e-4, atol=1e-3)
