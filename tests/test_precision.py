"""autocast around and inside the model, parameters in bf16 and fp16, mixed ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from tests.quick import TRACED

# Both sides round to the low precision in different orders (PyTorch sums biases in it, fxgrad in float32).
NEAR = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Net(nn.Module):
    """A convolution, norms, an embedding, attention and a tied head."""

    def __init__(self, inside: torch.dtype | None = None) -> None:
        super().__init__()
        self.inside = inside
        self.embed = nn.Embedding(7, 8)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        if self.inside is None:
            return self.body(h)
        with torch.autocast(ids.device.type, dtype=self.inside):
            h = self.body(h)
        return h.float()

    def body(self, h: Tensor) -> Tensor:
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2) * self.scale
        h = self.norm(h)
        h = h + self.attend(h, h, h)[0]
        return F.linear(h, self.embed.weight)


def loop(model: nn.Module, ids: Tensor, around: torch.dtype | None) -> dict[str, Tensor]:
    """One plain backward for each sample alone, in the precision that is tested."""
    rows = []
    for row in ids:
        with torch.autocast(ids.device.type, dtype=around, enabled=around is not None):
            out = model(row[None])
        grads = torch.autograd.grad(out.float().square().sum(), list(model.parameters()))
        rows.append(grads)
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def check(model: nn.Module, ids: Tensor, backend: str, around: torch.dtype | None, tolerance: float) -> None:
    expected = loop(copy.deepcopy(model), ids, around)
    gs = fxgrad.transform(model, backend=backend)
    with torch.autocast(ids.device.type, dtype=around, enabled=around is not None):
        out = gs(ids)
    out.float().square().sum().backward()
    largest = max(grad.abs().max() for grad in expected.values()).float()
    for name, parameter in model.named_parameters():
        found: Tensor = parameter.grad_sample  # type: ignore[attr-defined]
        assert found.dtype == parameter.dtype, name
        error = (found.float() - expected[name].float()).abs().max()
        assert error <= tolerance * max(expected[name].float().abs().max(), 1e-2 * largest), name


@pytest.fixture
def ids(device: torch.device) -> Tensor:
    return torch.randint(7, (4, 5), device=device)


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_autocast(dtype: torch.dtype, where: str, backend: str, ids: Tensor, device: torch.device) -> None:
    model = Net(dtype if where == "inside" else None).to(device)
    check(model, ids, backend, dtype if where == "around" else None, NEAR[dtype])


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_parameters_of_low_precision(dtype: torch.dtype, backend: str, ids: Tensor, device: torch.device) -> None:
    check(Net().to(device, dtype), ids, backend, None, 2 * NEAR[dtype])


def test_the_forward_under_autocast_is_the_plain_one(ids: Tensor, device: torch.device) -> None:
    model = Net().to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(fxgrad.transform(model, backend="aot_eager")(ids), model(ids))


@pytest.mark.inductor
@pytest.mark.parametrize("where", ["around", pytest.param("inside", marks=pytest.mark.long)])
def test_autocast_through_inductor(where: str, ids: Tensor, device: torch.device) -> None:
    model = Net(torch.bfloat16 if where == "inside" else None).to(device)
    check(model, ids, "inductor", torch.bfloat16 if where == "around" else None, 2 * NEAR[torch.bfloat16])


def test_float64_under_autocast_stays_float64(device: torch.device) -> None:
    model = nn.Linear(3, 2).double().to(device)
    x = torch.randn(4, 3, dtype=torch.double, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        fxgrad.transform(model, backend="aot_eager")(x).sum().backward()
    assert model.weight.grad_sample.dtype is torch.float64  # type: ignore[attr-defined]
    torch.testing.assert_close(model.weight.grad_sample, x.unsqueeze(1).expand(-1, 2, -1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_functions_of_parameters_with_a_dtype_of_their_own(dtype: torch.dtype, device: torch.device) -> None:
    """For norms they run in float64, also where they are told another dtype."""
    torch.manual_seed(0)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
            nn.utils.parametrizations.weight_norm(self.first)

        def forward(self, x: Tensor) -> Tensor:
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            length = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True, dtype=dtype)
            return F.linear(self.first(x), self.weight / length.to(self.weight.dtype))

    model, found = Normed().to(device, dtype), []
    for one in (model, copy.deepcopy(model).double()):
        clipped = fxgrad.ClippedGrad(1e-2)
        transformed = fxgrad.transform(one, quantity=clipped, backend="eager")
        x = torch.randn(4, 7, 8, generator=torch.Generator().manual_seed(1)).to(device, next(one.parameters()).dtype)
        transformed(x).float().sum().backward()
        found.append(fxgrad.result(transformed, clipped).norm_sample.double())
    torch.testing.assert_close(*found, rtol=3e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)
