"""One model for each family of rules, in float32, through Inductor."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import fxgrad
from fxgrad.compile.inductor import prepare
from fxgrad.testing import assert_per_sample_grads, default_loss
from tests.allocations import peak
from tests.cases import BATCH, Case, case, ids, w, x
from tests.quick import long_but

pytestmark = pytest.mark.inductor


def products(x: Tensor, v: Tensor, w: Tensor, b: Tensor, left: Tensor, heads: Tensor, u: Tensor, z: Tensor) -> Tensor:
    """linear, matmul on both sides, a batch of weights, einsum, addmm, mv"""
    h = F.linear(x, v, b).tanh() @ w + F.linear(x, v.t())
    h = (left @ h).unsqueeze(1) @ heads
    h = torch.einsum("bhti,ij->btj", h.tanh(), u)
    h = torch.addmm(z, h.sum(1).tanh(), u.t() @ u, beta=0.5)
    return torch.mv(h, z)


def convolutions(x: Tensor, one: Tensor, bias: Tensor, two: Tensor, three: Tensor, up: Tensor) -> list[Tensor]:
    """conv1d, conv2d and conv3d with strides, groups and padding by name, conv_transpose"""
    h = F.conv1d(x, one, bias, stride=2, padding=2).tanh()
    up = F.conv_transpose1d(h, up, stride=2, output_padding=1, groups=2)
    h = F.conv2d(h.unsqueeze(2), two[:, :, :1], bias, padding=(1, 1), groups=6)
    return [up, h, F.conv3d(h.unsqueeze(1), three, padding="valid", dilation=(2, 1, 1))]


def norms(x: Tensor, w: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """layer_norm, rms_norm, group_norm, instance_norm, batch_norm in eval mode, prelu"""
    h = F.layer_norm(x, (6,), w, b) + F.rms_norm(x, (6,), w, eps=0.01)
    h = F.prelu(F.group_norm(h * x, 2, c, d), d)
    h = h + F.instance_norm(h * x, weight=c, bias=d)
    return F.batch_norm(h, torch.zeros_like(c), torch.ones_like(c), d, c)


def lookups(ids: Tensor, table: Tensor, positions: Tensor, relative: Tensor) -> Tensor:
    """embedding with padding, rows by index, position and relative tables, a tied head"""
    steps = torch.arange(4, device=ids.device)
    h = F.embedding(ids, table, padding_idx=-2) + F.embedding(steps, positions)
    bias = relative[(steps[:, None] - steps).clamp(-2, 2) + 2].permute(2, 0, 1)
    scores = (h @ h.mT).unsqueeze(1) + bias
    return F.linear(scores.softmax(-1).mean(1) @ (h + positions[ids]), table)


def elementwise(x: Tensor, w: Tensor, scale: Tensor, rows: Tensor, more: Tensor) -> Tensor:
    """arithmetic with broadcasting, a parameter in any place, in place too"""
    h = torch.addcmul(w, x * scale, x, value=0.5) - rows / (1 + x * x)
    h = torch.where(x > 0, w, h).add_(w).mul_(rows)
    return (h * more).movedim(1, 0) + (w - x).clamp(max=scale).unsqueeze(1)


def moved(x: Tensor, cls: Tensor, v: Tensor, w: Tensor, two: Tensor) -> Any:
    """functions of parameters, and parameters handed out to the samples"""
    h = torch.cat([cls.expand(len(x), -1, -1), x, v.repeat(len(x), 1, 1)], 1)
    weight = torch.cat([v, torch.zeros_like(v), w.t()]) / v.norm()
    upper, lower = F.normalize(two, dim=1).chunk(2)
    h = F.linear(h, weight).tanh() @ torch.stack([upper, lower, v]).flatten(0, 1)
    return h.flatten(0, 1).unflatten(0, (-1, 8)) * two[[0, 2, 0]].narrow(0, 1, 1).squeeze()


def generic(x: Tensor, w: Tensor, table: Tensor, bias: Tensor, fill: Tensor) -> Tensor:
    """ops without a rule (but bilinear): index_select, attention with a bias, masked_fill"""
    h = F.scaled_dot_product_attention(x, x, x, attn_mask=bias)
    h = F.bilinear(h, x, w)
    ids = (x[..., 0] > 0).long().flatten()
    rows = table.index_select(0, ids).unflatten(0, (-1, 4))
    return torch.cat([h, rows], -1).masked_fill(torch.cat([h, rows], -1) > 1, fill)


FAMILIES = [
    case("products", products, x(4, 6), w(6, 6), w(6, 6), w(6), w(3, 4), w(2, 6, 5), w(5, 30), w(30)),
    case("convolutions", convolutions, x(4, 6), w(6, 4, 3), w(6), w(6, 1, 2, 3), w(2, 1, 2, 2, 2), w(6, 2, 3)),
    case("norms", norms, x(4, 6), w(6), w(6), w(4), w(4)),
    case("lookups", lookups, ids(7, 4), w(7, 6), w(9, 6), w(5, 2)),
    case("elementwise", elementwise, x(4, 6), w(6), w(), w(4, 1), w(3, 1, 1, 6)),
    case("moved", moved, x(4, 6), w(1, 1, 6), w(3, 6), w(6, 3), w(6, 6)),
    case("generic", generic, x(4, 6), w(3, 6, 6), w(7, 6), w(4, 4), w()),
]


@pytest.mark.parametrize(
    "case",
    long_but(lambda case: case.name in ("products", "convolutions"), FAMILIES),
    ids=lambda case: case.name,
)
def test_family(case: Case, device: torch.device) -> None:
    model = case.model(device).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)  # small enough for float32
    inputs = [value.detach() for value in case.inputs(device)]
    inputs = [value.float().requires_grad_() if value.is_floating_point() else value for value in inputs]
    assert_per_sample_grads(model, *inputs, backend="inductor", tolerance=1e-4)


def test_a_linear_layer_s_forward_is_one_call(device: torch.device) -> None:
    model = fxgrad.transform(nn.Linear(3, 2).to(device))
    out, (forward, *_) = run_and_get_code(model, torch.randn(BATCH, 3, device=device))
    default_loss(out).backward()
    assert forward.count("extern_kernels.addmm(") == 1
    assert "cpp_fused" not in forward and "triton_poi" not in forward


ROOT = re.compile(r"rsqrt\(|1 / std::sqrt\(")  # of a variance


def test_group_norm_s_statistics_are_the_forward_s(device: torch.device) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()).to(device)
    model = fxgrad.transform(layers, quantity=fxgrad.ClippedGrad(1.0))
    x = torch.randn(BATCH, 3, 32, 32, device=device)
    _, (forward, backward, *_) = run_and_get_code(lambda: default_loss(model(x)).backward())
    assert ROOT.search(forward)
    assert not ROOT.search(backward) and "welford" not in backward


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_statistics_of_a_norm_over_features_are_the_forward_s(kind: type[nn.Module], device: torch.device) -> None:
    model = fxgrad.transform(kind(64).to(device), quantity=fxgrad.ClippedGrad(1.0))
    x = torch.randn(BATCH, 8, 64, device=device)
    _, (forward, backward, *_) = run_and_get_code(lambda: default_loss(model(x)).backward())
    assert ROOT.search(forward)
    assert not ROOT.search(backward)


def test_a_weight_is_computed_once_for_all_that_read_it(device: torch.device) -> None:
    layers = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    model = fxgrad.transform(layers, quantity=fxgrad.ClippedGrad(1.0))
    x = torch.randn(64, 64, device=device)
    _, (_, backward, *_) = run_and_get_code(lambda: default_loss(model(x)).backward())
    assert 1 <= len(re.findall(r"nextafter\(", backward)) <= 2  # of vectors, and of what is left of one


class Returns(nn.Module):
    """Returns a part of a layer's output, which the backward reads too."""

    def __init__(self, layer: nn.Module, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.part = layer, part

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        h = h[0] if isinstance(h, tuple) else h
        return self.part(h), (h * h * h).sum()


LAYERS = {"linear": lambda: nn.Linear(3, 3), "gru": lambda: nn.GRU(3, 3, batch_first=True)}
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda h: h,
    "transposed": lambda h: h.transpose(0, -1),
    "flat": lambda h: h.float().flatten(),
    "expanded": lambda h: h.unsqueeze(1).expand(-1, 2, -1, -1),
}


@pytest.mark.parametrize(
    ("layer", "part"),
    long_but(lambda layer, part: layer == "linear" or part == "all", itertools.product(LAYERS, PARTS)),
)
def test_the_backward_leaves_the_outputs_alone(layer: str, part: str, device: torch.device) -> None:
    """See Note [Donated buffers] in fxgrad/compile/compiler.py."""
    gs = fxgrad.transform(Returns(LAYERS[layer](), PARTS[part]).to(device))
    outputs = gs(torch.randn(16, 5, 3, device=device))
    before = [output.detach().clone() for output in outputs]
    sum(output.sum() for output in outputs).backward()
    assert all(torch.equal(a, b) for a, b in zip(outputs, before, strict=True))


def test_no_cached_backward_writes_over_the_outputs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache may hold the same backward, compiled for a graph whose outputs it could not reach."""
    model = Returns(nn.Linear(3, 3), lambda h: h.transpose(0, -1)).to(device)
    x = torch.randn(16, 5, 3, device=device)
    with monkeypatch.context() as patched:
        patched.setattr("fxgrad.compile.compiler._outputs_kept", lambda gm: contextlib.nullcontext())
        sum(output.sum() for output in fxgrad.transform(model)(x)).backward()
    torch._dynamo.reset()
    fxgrad.zero_grad(model)
    outputs = fxgrad.transform(model)(x)
    before = outputs[0].detach().clone()
    sum(output.sum() for output in outputs).backward()
    assert torch.equal(outputs[0], before)


class Pooled(nn.Module):
    """Windows that overlap in every pool, and the loss of each sample."""

    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Conv2d(1, 4, 4, stride=2), nn.Conv2d(4, 4, 4, stride=2)]
        layers = [layer for conv in stages for layer in (conv, nn.ReLU(), nn.MaxPool2d(2, 1))]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y, reduction="none").sum()


@pytest.mark.parametrize("strategy", long_but(lambda how: how == "recompute", ["recompute", "gram", "materialise"]))
def test_what_reads_a_buffer_runs_after_what_adds_into_it(
    strategy: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to torch 2.13 Inductor forgets that its backward of overlapping windows writes: inductor.py."""
    monkeypatch.setattr("fxgrad.compile.inductor.on_cpu_decompositions", lambda table: table)  # as elsewhere
    torch.manual_seed(0)
    model, x, y = Pooled().to(device), torch.randn(16, 1, 28, 28, device=device), torch.arange(16, device=device) % 10
    plain = copy.deepcopy(model)
    fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1e6), strategy=strategy)(x, y).backward()
    plain(x, y).backward()
    for found, p in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, p.grad, rtol=1e-3, atol=1e-4)


def test_the_cache_is_told_of_what_is_mended() -> None:
    """The tag is part of Inductor's key; what a wrong key would give, the next test sees in a cache of its own."""
    prepare()
    assert ("renames kept" in torch.compiler.config.cache_key_tag) == (torch.__version__ < "2.14")
    assert "floats bound" in torch.compiler.config.cache_key_tag


@pytest.mark.long
def test_no_cached_backward_reads_before_what_adds(device: torch.device, tmp_path: Path) -> None:
    """What Inductor cached without the renames is not found by who keeps them; what they cached is."""
    if torch.__version__ >= "2.14":
        pytest.skip("PyTorch keeps them itself")
    script = tmp_path / "run.py"
    script.write_text(_CACHED.format(root=str(Path(__file__).parent.parent)))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(script), str(device)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (_, first), (right, second), (again, third) = map(str.split, done.stdout.splitlines()[-3:])
    assert right == again == "True"
    assert int(first) == int(second) == 0 < int(third)


_CACHED = """
import sys
sys.path.insert(0, {root!r})
import torch, fxgrad, fxgrad.compile.inductor, fxgrad.compile.warm_start
from torch._dynamo.utils import counters
from tests.test_inductor import Pooled
fxgrad.compile.inductor.on_cpu_decompositions = lambda table: table
keeps = fxgrad.compile.inductor.prepare
device = torch.device(sys.argv[1])
for prepare in (fxgrad.host.inductor.import_compiler, keeps, keeps):
    fxgrad.compile.inductor.prepare = fxgrad.compile.warm_start.prepare = prepare
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x, y = Pooled().to(device), torch.randn(16, 1, 28, 28, device=device), torch.arange(16, device=device) % 10
    fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1e6), strategy="recompute")(x, y).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x, y).backward()
    right = all(torch.allclose(grad, p.grad, rtol=1e-3, atol=1e-4) for grad, p in zip(found, model.parameters()))
    print(right, counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_tied_weights_gradients_are_held_once() -> None:
    """Rows of the table are added to what the head has multiplied out; a second gradient would be nearly all zeros."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3001, 64, padding_idx=3)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids).tanh(), self.table.weight).logsumexp((1, 2))

    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(3001, (8, 5))
    transformed = fxgrad.transform(model)
    transformed(ids).sum().backward()  # compiles
    transformed.zero_grad()
    loss = transformed(ids).sum()
    whole = 8 * 3001 * 64 * 4
    assert whole <= peak(loss.backward) <= 1.3 * whole
    transformed.zero_grad()
    assert_per_sample_grads(model, ids, backend="inductor", tolerance=1e-4)


def test_a_float_that_is_read_reaches_the_backward(device: torch.device) -> None:
    """The backward multiplies by an int made of it; the weight that it was read from is not saved."""

    def scaled(x: Tensor, y: Tensor, w: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w, b) * (int(b.detach().abs().sum().item() / 100) + 2), y + p

    read = case("read", scaled, x(1), x(1), w(1, 1), w(1), w(1))
    assert_per_sample_grads(read.model(device), *read.inputs(device), backend="inductor", tolerance=1e-9)
