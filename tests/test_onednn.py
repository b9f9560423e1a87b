"""Products on oneDNN against float64, in each form that their shapes choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.costs.machines import Machine
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


@pytest.mark.parametrize("step", [0, 1, 4, 39])
@pytest.mark.parametrize("rows", ["x", "g", "x transposed"])
def test_rows_may_overlap(rows: str, step: int) -> None:
    m, o, i = 300, 200, 40
    if rows == "x":
        g, x = torch.randn(m, o), torch.randn(m * 40 + i).as_strided((m, i), (step, 1))
    elif rows == "g":
        g, x = torch.randn(m * 40 + o).as_strided((m, o), (step, 1)), torch.randn(m, i)
    else:
        g, x = torch.randn(m, o), torch.randn(m + 40 * i).as_strided((m, i), (1, step))
    torch.testing.assert_close(onednn.outer_products(g, x).double(), g.double().t() @ x.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_samples_that_overlap(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(Machine, "onednn_pays", lambda _: True)
    torch.manual_seed(0)
    layer, true, windows = nn.Linear(128, 256), nn.Linear(128, 256).double(), torch.randn(600).unfold(0, 128, 1)
    true.load_state_dict(layer.state_dict())
    fxgrad.transform(layer, fxgrad.ClippedGrad(1.0), backend=backend)(windows).square().sum().backward()
    output = true(windows.double())
    (g,) = torch.autograd.grad(output.square().sum(), output)
    weights = 1 / (g.norm(dim=1) * (windows.double().square().sum(1) + 1).sqrt())
    clipped = (g * weights.clamp(max=1).unsqueeze(1)).t() @ windows.double()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.double(), clipped, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_a_bias_is_read_where_it_lies(layout: str) -> None:
    bias = torch.arange(12.0)[::2] if layout == "strided" else torch.ones(1).expand(6)
    x, w = torch.randn(5, 3), torch.randn(6, 3)
    torch.testing.assert_close(onednn.rows_times(x, w, bias), nn.functional.linear(x, w, bias))


@pytest.mark.parametrize("name", ["GRU", "LSTM", "RNN"])
def test_a_recurrent_layer_s_strided_bias(name: str) -> None:
    torch.manual_seed(0)
    layer, true, x = *(getattr(nn, name)(5, 6, batch_first=True) for _ in range(2)), torch.randn(4, 7, 5)
    layer.bias_ih_l0 = nn.Parameter(torch.randn(len(layer.bias_ih_l0), 2)[:, 0])
    true.double().load_state_dict(layer.state_dict())
    fxgrad.transform(layer, backend="aot_eager")(x)[0].square().sum().backward()
    for i in range(4):
        true.zero_grad()
        true(x[i : i + 1].double())[0].square().sum().backward()
        for p, q in zip(layer.parameters(), true.parameters(), strict=True):
            torch.testing.assert_close(p.grad_sample[i].double(), q.grad, rtol=1e-4, atol=1e-4)
