"""Random numbers: the transformed model draws what the plain one draws, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.testing import assert_per_sample_grads


class Random(nn.Module):
    """Dropout of several kinds, noise, and a parameter that only the generic rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 6, 3, padding=1), nn.Linear(6, 4)
        self.qkv = nn.Linear(4, 12)
        self.exponents = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout1d(self.first(x.transpose(1, 2)), 0.4, self.training).transpose(1, 2)
        h = h.contiguous()  # else matmul takes another kernel for a weight without gradients, as ours are
        h = self.second(F.dropout(h.relu(), 0.5, self.training))
        h = h + 0.1 * torch.randn_like(h) + torch.rand(4, device=h.device)
        q, k, v = self.qkv(h).unsqueeze(1).chunk(3, -1)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * self.training).squeeze(1)
        out: Tensor = F.softplus(h) ** self.exponents
        return out


class Dropped(nn.Module):
    """One layer, and a draw before and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x + torch.randn_like(x)), 0.5, self.training)


def run(call: object, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    out = call(x)  # type: ignore[operator]
    out.sum().backward()
    return out.detach(), torch.get_rng_state()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_same_draws_as_eager(backend: str, device: torch.device) -> None:
    """Bitwise, and the generator is left where the plain model's forward and backward leave it."""
    model, x = Random().to(device), torch.randn(5, 3, 4, device=device)
    plain, state = run(model, x)
    model.zero_grad()
    own, own_state = run(fxgrad.transform(model, backend=backend), x)
    assert torch.equal(own, plain)
    assert torch.equal(own_state, state)


@pytest.mark.inductor
@pytest.mark.parametrize("make", [Dropped, pytest.param(Random, marks=pytest.mark.long)])
def test_same_draws_as_the_plain_compiled_model(make: Callable[[], nn.Module], device: torch.device) -> None:
    model, x = make().to(device), torch.randn(5, 3, 4, device=device)
    compiled = torch.compile(model, dynamic=True)
    plain, state = run(compiled, x)
    model.zero_grad()
    torch._dynamo.reset()
    own, own_state = run(fxgrad.transform(model), x)
    torch.testing.assert_close(own, plain)
    assert torch.equal((own == 0), (plain == 0))
    assert torch.equal(own_state, state)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_against_full_batches_under_one_seed(backend: str, device: torch.device) -> None:
    model, x = Random().double().to(device), torch.randn(4, 3, 4, dtype=torch.double, device=device)
    assert_per_sample_grads(model, x, backend=backend, seed=3, tolerance=1e-8)


def test_the_backward_draws_nothing(device: torch.device) -> None:
    out = fxgrad.transform(Random().to(device), backend="aot_eager")(torch.randn(5, 3, 4, device=device))
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_eval_mode_draws_nothing(device: torch.device) -> None:
    class Drops(nn.Sequential):
        pass

    model = Drops(nn.Linear(4, 4), nn.Dropout(0.5)).double().to(device).eval()
    assert_per_sample_grads(model, torch.randn(4, 4, dtype=torch.double, device=device), backend="aot_eager")
