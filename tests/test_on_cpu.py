"""Ops that take another form on CPU, and the layout behind the last convolution, against the loop over samples."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import fxgrad
from fxgrad.kernels import on_cpu
from fxgrad.testing import assert_per_sample_grads, default_loss
from tests.quick import long_but

pytestmark = pytest.mark.inductor

WINDOWS: dict[str, dict[str, Any]] = {
    "apart": {"kernel_size": 2},
    "overlapping": {"kernel_size": 3, "stride": 1},
    "padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": (2, 3), "dilation": (2, 1)},
    "with a rest": {"kernel_size": 2, "stride": (2, 3), "ceil_mode": True},
    "of one": {"kernel_size": 1, "stride": 2},
    "of all": {"kernel_size": 7},
}


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2}

QUICK_WINDOWS = (("apart", 1), ("overlapping", 4), ("dilated", 4), ("with a rest", 4))


class Network(nn.Module):
    """A small network for images; what is behind its last convolution differs."""

    def __init__(self, behind: Callable[[Tensor], Tensor], channels: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, channels, 3, padding=1)
        self.behind = behind
        self.scale = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.last((self.first(x) * self.scale).relu()))


def images(n: int = 4, **like: Any) -> Tensor:
    return torch.randn(n, 2, 7, 7, **like)


def agrees(model: nn.Module, *inputs: Tensor) -> None:
    assert_per_sample_grads(model, *inputs, backend="inductor", tolerance=1e-4)


@pytest.mark.parametrize(
    ("window", "channels"),
    long_but(lambda window, channels: (window, channels) in QUICK_WINDOWS, itertools.product(WINDOWS, (4, 1))),
)
def test_max_pool(window: str, channels: int, device: torch.device) -> None:
    model = Network(lambda h: F.max_pool2d(h.relu(), **WINDOWS[window]).flatten(1), channels).to(device)
    agrees(model, images(device=device).requires_grad_())


def placed_again(h: Tensor) -> Tensor:
    return F.max_unpool2d(*F.max_pool2d(h.sigmoid(), 2, return_indices=True), (2, 2), output_size=[7, 7])


ENDS: dict[str, Callable[[Tensor], Any]] = {
    "kept and returned": lambda h: h.relu(),
    "a pool returned": lambda h: F.max_pool2d(h, 2),
    "a mean": lambda h: h.relu().mean((2, 3)),
    "an average pool": lambda h: F.avg_pool2d(h.relu(), 2).flatten(1),
    "a view, as tokens": lambda h: F.silu(h).flatten(2).transpose(1, 2),
    "a pool of a pool": lambda h: F.max_pool2d(F.max_pool2d(h, 2), 2).flatten(1).tanh(),
    "read twice": lambda h: F.max_pool2d(h, 2).sum((2, 3)) + h.relu().cumsum(3).amax((2, 3)),
    "placed again": placed_again,
    "in one dimension": lambda h: F.max_pool1d(h.flatten(2), 3, 2),
    "a threshold": lambda h: F.threshold(h, 0.3, 2.0).flatten(1),
    "broadcast": lambda h: (h.relu() + h.relu()[:, :1] * h.mean((2, 3), keepdim=True)).flatten(1),
    "its edges repeated": lambda h: F.pad(h.relu(), (1, 1, 1, 1), mode="replicate").flatten(1),
}


QUICK_ENDS = ("a pool returned", "read twice", "broadcast", "its edges repeated")


@pytest.mark.parametrize("end", long_but(lambda end: end in QUICK_ENDS, ENDS))
def test_behind_the_last_convolution(end: str, device: torch.device) -> None:
    agrees(Network(ENDS[end]).to(device), images(device=device))


def halves(h: Tensor) -> Any:
    return h[:, :2].flatten(1), h[:, 2:].flatten(1)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "of a ReLU": lambda h: halves(h.relu()),
    "of a pool": lambda h: halves(F.max_pool2d(h, 2)),
    "of the convolution": halves,
    "three of them": lambda h: tuple(F.silu(h)[:, i : i + 1].flatten(2) for i in range(3)),
    "of rows": lambda h: (h.relu()[:, :, 0], h.relu()[:, :, 1:].flatten(2)),
    "of every other": lambda h: (h.relu()[..., ::2], h.relu()[:, 1:]),
    "turned over": lambda h: (h.transpose(1, 2), h.tanh().permute(0, 2, 3, 1)[:, :, 1:]),
    "spread": lambda h: (h.mean(1, keepdim=True).expand(-1, 3, -1, -1), h[:, :1].expand(-1, 3, -1, -1)),
    "of what is returned": lambda h: (h, h[:, :2], h[:, 2:]),
    "of a part": lambda h: (h[:, 1:], h[:, 1:][..., 2:]),
    "split": lambda h: h.relu().split(2, 1),
    "pieces of a normed value": lambda h: F.layer_norm(h, h.shape[1:])[:, 1:].chunk(3, 2),
}


@pytest.mark.parametrize("name", long_but(lambda name: name in ("three of them", "of the convolution"), VIEWS))
def test_two_views_of_one_value_are_returned(name: str, device: torch.device) -> None:
    """PyTorch makes them behind the graph, by the strides that it has traced; a plain compiled model mixes them up."""
    model = Network(VIEWS[name]).to(device)
    agrees(model, images(device=device))
    view = fxgrad.transform(model)
    for size in ((7, 7), (5, 8), (9, 6)):
        x = torch.randn(3, 2, *size, device=device)
        for one, other in zip(view(x), model(x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_two_views_before_the_last_convolution(device: torch.device) -> None:
    last = nn.Conv2d(4, 2, 3).to(device)
    agrees(nn.Sequential(Network(lambda h: h), Both(last)).to(device), images(device=device))


class Both(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.last = last

    def forward(self, h: Tensor) -> Any:
        return *halves(h.relu()), self.last(h.relu())


@pytest.mark.parametrize("n", [1, 4])
def test_channels_last_comes_in(n: int, device: torch.device) -> None:
    model = Network(lambda h: F.max_pool2d(h.relu(), 2).flatten(1)).to(device)
    agrees(model, images(n, device=device).contiguous(memory_format=torch.channels_last))


def test_no_convolution(device: torch.device) -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d((x * self.scale).relu(), 3, 2)

    agrees(Pool().to(device), images(device=device))
    agrees(Pool().to(device), images(device=device).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "end", long_but(lambda end: end == "kept and returned", ["kept and returned", "a pool returned"])
)
def test_outputs_have_the_plain_models_strides(end: str, device: torch.device) -> None:
    model, x = Network(ENDS[end]).to(device), images(device=device)
    view, plain = fxgrad.transform(copy.deepcopy(model)), torch.compile(model)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        assert view(given).stride() == plain(given).stride()


def of_parameters(model: nn.Module) -> list[Any]:
    return list(model.parameters())


def test_nan_stays(device: torch.device) -> None:
    """Where a ReLU's output is NaN its gradient passes, as in PyTorch: a sample is seen to be nonfinite."""

    def behind(h: Tensor) -> Tensor:
        return F.max_pool2d(h.relu(), 2).flatten(1)

    model, x = Network(behind).to(device), images(device=device)
    x[1, 0, 3, 3] = torch.nan
    norms: list[Tensor] = []
    for backend in ("inductor", "aot_eager"):
        norm = fxgrad.NormSample()
        transformed = fxgrad.transform(copy.deepcopy(model), quantity=norm, backend=backend)
        default_loss(transformed(x)).backward()
        norms.append(torch.stack([one.norm_sample for one in of_parameters(transformed)]))
    assert norms[0][:, 1].isnan().all()
    torch.testing.assert_close(norms[0], norms[1], equal_nan=True, rtol=1e-4, atol=1e-5)


def test_other_batch_sizes_use_the_same_code(device: torch.device) -> None:
    clipped = fxgrad.ClippedGrad(1.0)
    model = Network(lambda h: F.max_pool2d(h.relu(), 2).flatten(1)).to(device)
    transformed = fxgrad.transform(copy.deepcopy(model), quantity=clipped)
    for n in (3, 7, 1, 2):
        x = images(n, device=device)
        fxgrad.zero_grad(transformed)
        default_loss(transformed(x)).backward()
        loop = fxgrad.transform(copy.deepcopy(model), quantity=clipped, backend="eager")
        default_loss(loop(x)).backward()
        for p, q in zip(transformed.parameters(), loop.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_masks_are_not_saved_and_nothing_is_transposed() -> None:
    """On CPU: a ReLU's output is saved with channels last, and no loop scatters into zeros."""
    model = fxgrad.transform(Network(lambda h: F.max_pool2d(h.relu(), 2).flatten(1)), quantity=fxgrad.ClippedGrad(1.0))
    _, (forward, backward, *_) = run_and_get_code(lambda: default_loss(model(images())).backward())
    assert "torch.bool" not in forward
    assert "max_pool.default.direct(" in forward and "max_pool_backward.default.direct(" in backward
    assert "scatter_reduce" not in backward and "atomic_add" not in backward
    assert "(196, 1, 28, 4), 'input')" in backward  # saved as the convolution left it
    assert "(196, 49, 7, 1)" not in forward and "(196, 49, 7, 1)" not in backward


class Normed(nn.Sequential):
    """Convolutions, in groups and not, each with a norm of groups of its channels behind it."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for channels, groups in ((2, 1), (16, 4), (16, 1)):
            layers += [nn.Conv2d(channels, 16, 3, padding=1, groups=groups, bias=False), nn.GroupNorm(4, 16), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_norm_behind_a_convolution_transposes_nothing(device: torch.device) -> None:
    """On CPU: what it saves, and its input's gradient, are written as the convolution lays out its values."""
    torch.manual_seed(0)
    model = Normed().to(device)
    agrees(model, images(device=device))
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0))
    _, (forward, backward, *_) = run_and_get_code(lambda: default_loss(transformed(images(device=device))).backward())
    if device.type == "cpu":
        for contiguous in ("(784, 49, 7, 1)", "(784, 196, 49, 1)"):  # an image, and its groups
            assert contiguous not in forward and contiguous not in backward


class Chosen(nn.Module):
    """An op behind a convolution that a tensor chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor, here: Tensor) -> Tensor:
        h: Tensor = torch.cond(here, lambda h: h.relu(), lambda h: h.tanh(), (self.last(x),))
        return h.mean((2, 3))


def test_a_cond_behind_the_last_convolution(device: torch.device) -> None:
    """Its bodies are nodes of the graph without a value."""
    x, here = images(device=device), torch.tensor(True, device=device)
    found: list[list[Tensor]] = []
    for backend in ("inductor", "eager"):
        torch.manual_seed(0)
        model = fxgrad.transform(Chosen().to(device), backend=backend, in_dims=(0, None))
        default_loss(model(x, here)).backward()
        found.append([one.grad_sample for one in of_parameters(model)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_an_evaluation_gives_the_plain_outputs(device: torch.device) -> None:
    plain, x = Network(lambda h: F.max_pool2d(h.relu(), 2).flatten(1)).to(device).eval(), images(device=device)
    with torch.no_grad():
        torch.testing.assert_close(fxgrad.transform(copy.deepcopy(plain))(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("channels", "groups", "space"), [(6, 3, (5, 4)), (6, 6, (7,)), (4, 1, (2, 3, 2)), (8, 2, ())])
def test_group_norm(channels: int, groups: int, space: tuple[int, ...], affine: tuple[bool, bool], dtype: Any) -> None:
    """Put together from channels, it is what PyTorch computes: a group's channels may lie far from each other."""
    x = torch.randn(3, channels, *space) * torch.rand(channels, *[1] * len(space)) + 10 * torch.randn(
        3, channels, *[1] * len(space)
    )
    weight, bias = (torch.randn(channels) if one else None for one in affine)
    sizes: tuple[Any, ...] = 3, channels, math.prod(space), groups, 1e-5
    given: list[Any] = [one if one is None else one.to(dtype) for one in (x, weight, bias)]
    doubles: list[Any] = [one if one is None else one.double() for one in given]
    exact = torch.native_group_norm(*doubles, *sizes)
    for one, expected in zip(on_cpu.group_norm(*given, *sizes), exact, strict=True):
        assert one.dtype == dtype and one.shape == expected.shape
        torch.testing.assert_close(one.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_networks_with_group_norms(groups: int, channels_last: bool) -> None:
    norm = nn.GroupNorm(groups, 6)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.Flatten())
    x = images()
    agrees(model, x.to(memory_format=torch.channels_last) if channels_last else x)
