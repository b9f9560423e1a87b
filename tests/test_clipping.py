"""ClippedGrad: the bound in floating point, groups, weights, padding, and the rules of its state."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fxgrad
from fxgrad.costs.choices import Planner
from fxgrad.errors import AlreadySet, GraphBreak, NonFinite, OptionError
from fxgrad.kernels.gram import window_gram
from fxgrad.kernels.precision import at_most
from fxgrad.kernels.products import product_norms
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.tables import row_norms
from fxgrad.kernels.windows import window_norms
from fxgrad.terms import OneHot, Patches, Term
from fxgrad.testing import default_loss, per_sample_grads, relative_error
from tests.programs import quick_dynamo

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


def net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device, torch.float64)


def rows(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return per_sample_grads(model, default_loss, (x,))


def norms(grads: dict[str, Tensor], *names: str) -> Tensor:
    return torch.cat([g.flatten(1) for name, g in grads.items() if name in (names or grads)], 1).norm(dim=1)


def close(actual: Tensor, expected: Tensor) -> bool:
    return relative_error({"": actual}, {"": expected}) <= 1e-10


# The bound: ‖c g‖ <= C (1 + 1e-5) for c as applied and g in exact arithmetic.


def cancelling(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that take each other back, but for what rounding leaves."""
    return torch.cat([g, -g], 1), torch.cat([x, x * (1 + 2**-20)], 1)


SHAPES = {
    "huge": lambda g, x: (g * 1e18, x * 1e18),
    "tiny": lambda g, x: (g * 1e-22, x * 1e-22),
    "denormal": lambda g, x: (g * 1e-40, x),
    "huge times tiny": lambda g, x: (g * 1e25, x * 1e-25),
    "cancelling": cancelling,
    "one large": lambda g, x: (torch.cat([g[:, :1] * 1e6, g], 1), torch.cat([x[:, :1], x], 1)),
    "equal": lambda g, x: (g[:, :1].expand_as(g).contiguous(), x[:, :1].expand_as(x).contiguous()),
    "plain": lambda g, x: (g, x),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("k", [1, 2, 33, 700])
def test_the_bound_of_products(shape: str, gram: bool, k: int, device: torch.device) -> None:
    torch.manual_seed(k)
    g, x = SHAPES[shape](torch.randn(4, k, 9, device=device), torch.randn(4, k, 6, device=device))
    exact = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    found, bound = product_norms(g, x, gram)
    assert bool((bound * (1 + 1e-9) >= exact).all())
    if shape not in ("cancelling",):
        assert bool((bound <= exact * (1 + 1e-3) + 1e-300).all()), (bound / exact).tolist()
        assert bool(((found - exact).abs() <= 1e-3 * exact).all())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 3, 40]),
    st.floats(-36, 36),
    st.floats(-36, 36),
    st.booleans(),
    st.booleans(),
)
def test_the_bound_over_all_scales(seed: int, k: int, a: float, b: float, back: bool, gram: bool) -> None:
    torch.manual_seed(seed)
    g, x = torch.randn(3, k, 5) * 10.0**a, torch.randn(3, k, 4) * 10.0**b
    if back:
        g, x = cancelling(g, x)
    exact = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    _, bound = product_norms(g, x, gram)
    finite = g.isfinite().flatten(1).all(1) & x.isfinite().flatten(1).all(1)
    for c in (1e-8, 1.0, 1e8):
        weight = at_most((c / (bound + 1e-6)).clamp(max=1), torch.float32).double()
        assert bool((weight * exact <= c * (1 + 1e-5))[finite].all())


def test_the_bound_of_windows_and_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    kernel, settings = (4, 4, 3, 3), Settings((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    planner = Planner()
    for scale in (1.0, 1e15, 1e-20):
        x, g = (torch.randn(3, 1, 4, 9, 9, device=device) * scale for _ in range(2))
        exact = Term("nko...,nk...i->noi", g.double(), Patches(x.double(), kernel, settings))
        wanted = exact.dense().flatten(1).norm(dim=1)
        found, bound = Term("nko...,nk...i->noi", g, Patches(x, kernel, settings)).norms(
            lambda term: planner.of("", term, deferred=True)
        )
        assert bool((bound >= wanted).all()) and bool((bound <= wanted * (1 + 1e-3)).all())
        found, bound = window_norms(g, x, kernel, settings.numbers(), True)
        assert bool((bound >= wanted).all()) and bool((bound <= wanted * (1 + 1e-3)).all())
        assert bool(((found - wanted).abs() <= 1e-4 * wanted).all())
        ids = torch.randint(5, (3, 20), device=device)
        h = torch.randn(3, 20, 6, device=device) * scale
        wanted = Term("n...v,n...d->nvd", OneHot(ids, 5), h.double()).dense().flatten(1).norm(dim=1)
        found, bound = row_norms(ids, h, 5, -1)
        assert bool((bound >= wanted).all()) and bool((bound <= wanted * (1 + 1e-3)).all())
        assert bool(((found - wanted).abs() <= 1e-5 * wanted).all())


@pytest.mark.parametrize(
    ("space", "kernel", "stride", "padding", "dilation"),
    [
        ((7,), (3,), (2,), (1,), (2,)),
        ((6, 5), (3, 2), (1, 2), (1, 0), (1, 2)),
        ((4, 4, 5), (2, 2, 3), (1, 1, 2), (0, 1, 1), (1, 1, 1)),
    ],
    ids=["1d", "2d", "3d"],
)
def test_the_windows_products(space: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    """Against the windows themselves, read by a convolution whose kernels pick one element each."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, *space, dtype=torch.float64)
    picks = torch.eye(3 * torch.Size(kernel).numel(), dtype=torch.float64).view(-1, 3, *kernel)
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(space)]
    windows = conv(x, picks, None, stride, padding, dilation)
    flat = windows.flatten(2)
    settings = Settings(stride, padding, dilation, False, (0,) * len(space), 1)
    assert close(window_gram(x, windows.shape[2:], kernel, settings), flat.mT @ flat)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_bound_of_a_whole_model(scale: float, device: torch.device) -> None:
    """What reaches p.grad from one sample is never longer than C."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(device)
    x = torch.randn(6, 7, 4, device=device)
    clipped = fxgrad.ClippedGrad(0.1)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    for i in range(len(x)):
        (transformed(x[i : i + 1]) * scale).sum().backward()
        total = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm()
        assert float(total) <= 0.1 * (1 + 1e-5)
        fxgrad.zero_grad(transformed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("also", [False, True], ids=["alone", "beside grad_sample"])
def test_half_types_are_clipped_in_float32(dtype: torch.dtype, also: bool, device: torch.device) -> None:
    """One sample's part, before the cast, is C long: after it, but for the cast's own rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)).to(device, dtype)
    x = torch.randn(2, 9, 16, device=device, dtype=dtype)
    clipped = fxgrad.ClippedGrad(0.1)
    quantities: list[Any] = [clipped, fxgrad.GradSample()] if also else [clipped]
    transformed = fxgrad.transform(model, quantity=quantities, backend="eager")
    transformed(x).float().square().sum().backward()
    report = fxgrad.result(transformed, clipped)
    assert report.norm_sample.dtype is report.weight.dtype is torch.float32
    assert bool((report.norm_sample.double() * report.weight.double() <= 0.1 * (1 + 1e-5)).all())
    assert bool((report.norm_sample.double() * report.weight.double() >= 0.1 * (1 - 1e-3)).all())
    for p in model.parameters():
        assert p.grad is not None and p.grad.dtype is dtype
        if also:
            wanted = torch.einsum("n,n...->...", report.weight, p.grad_sample.float())  # type: ignore[attr-defined]
            assert relative_error({"": p.grad.float()}, {"": wanted}) <= 2e-2


def test_the_bound_beside_grad_sample(device: torch.device) -> None:
    """Multiplied out for another quantity, a gradient whose positions cancel is bounded all the same."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False).to(device)
    g, x = cancelling(torch.randn(3, 40, 5, device=device) * 1e6, torch.randn(3, 40, 6, device=device))
    clipped = fxgrad.ClippedGrad(1e-3)
    transformed = fxgrad.transform(model, quantity=[clipped, fxgrad.GradSample()], backend="eager")
    (transformed(x) * g).sum().backward()
    exact = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    assert bool((exact * fxgrad.result(transformed, clipped).weight.double() <= 1e-3 * (1 + 1e-5)).all())


# Groups and weights


def test_per_parameter(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    clipped = fxgrad.ClippedGrad(0.3, groups="per_parameter")
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(transformed(x)).backward()
    for name, p in model.named_parameters():
        c = (0.3 / (norms(expected, name) + 1e-6)).clamp(max=1)
        assert p.grad is not None and close(p.grad, torch.einsum("n,n...->...", c, expected[name]))
    assert fxgrad.result(transformed, clipped).norm_sample.shape == (4, 5)


class Backwards(nn.Module):
    """Uses its layers, which are of one size, in another order than it has them in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


@pytest.mark.parametrize("batch", [5, 1])
def test_per_parameter_follows_the_model_s_order(batch: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Backwards().to(device, torch.float64)
    x = torch.randn(batch, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    clipped = fxgrad.ClippedGrad([0.1, 0.2, 0.3, 0.4], groups="per_parameter")
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(transformed(x)).backward()
    found = fxgrad.result(transformed, clipped)
    for i, (name, p) in enumerate(model.named_parameters()):
        c = (clipped.max_grad_norm[i] / (norms(expected, name) + 1e-6)).clamp(max=1)  # type: ignore[index]
        assert close(found.norm_sample[i], norms(expected, name)) and close(found.weight[i], c)
        assert p.grad is not None and close(p.grad, torch.einsum("n,n...->...", c, expected[name]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(quantity=fxgrad.ClippedGrad([1.0, 2.0, 3.0, 4.0], groups="per_parameter")), "in which order"),
        (dict(quantity=fxgrad.ClippedGrad(1.0), mixing="allow"), "refuses mixing='allow'"),
        (dict(quantity=fxgrad.ClippedGrad(1.0, group_size=0)), "group_size has to be"),
        (dict(quantity=fxgrad.GradSample(), mixing="yes"), "mixing has to be"),
    ],
    ids=["order", "mixing", "group_size", "another mixing"],
)
def test_the_backend_checks_its_quantities(options: dict[str, Any], sentence: str, device: torch.device) -> None:
    model = torch.compile(net(device), backend="fxgrad", options={"backend": "eager", **options})
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    with pytest.raises((OptionError, BackendCompilerFailed), match=sentence):
        model(x)
    assert not vars(x), "no mark is left on an input"


def test_groups_by_name(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    groups = [["0.weight", "2.bias"], ["0.bias", "2.weight"]]
    clipped = fxgrad.ClippedGrad([0.3, 0.2], groups=groups)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(transformed(x)).backward()
    found = dict(model.named_parameters())
    for group, bound in zip(groups, (0.3, 0.2), strict=True):
        c = (bound / (norms(expected, *group) + 1e-6)).clamp(max=1)
        for name in group:
            grad = found[name].grad
            assert grad is not None and close(grad, torch.einsum("n,n...->...", c, expected[name]))


def test_automatic_and_a_function(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    length = norms(expected)
    middle = float(length.median())
    every: list[tuple[Any, Tensor]] = [
        ("automatic", 0.7 / (length + 0.01)),
        (lambda n: torch.exp(-n), torch.exp(-length)),
        (lambda n: n < middle, (length < middle).double()),
    ]
    for how, c in every:
        transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(0.7, weights=how), backend="aot_eager")
        default_loss(transformed(x)).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and close(p.grad, torch.einsum("n,n...->...", c, expected[name]))
        fxgrad.zero_grad(transformed)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_infinite_bound_clips_nothing(backend: str, device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    clipped = fxgrad.ClippedGrad(math.inf)
    transformed = fxgrad.transform(model, quantity=clipped, backend=backend)
    default_loss(transformed(x)).backward()
    report = fxgrad.result(transformed, clipped)
    assert report.weight.tolist() == [1] * 5 and int(report.nonfinite) == 0
    for name, g in rows(model, x).items():
        grad = model.get_parameter(name).grad
        assert grad is not None and close(grad, g.sum(0))


@pytest.mark.parametrize("groups", ["flat", "per_parameter"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_function_s_weight_that_is_not_finite_is_zero_and_counted(
    groups: Any, value: float, device: torch.device
) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    largest = norms(expected).argmax()

    def weights(n: Tensor) -> Tensor:
        return torch.where(n == n.max(), value, 0.5)

    clipped = fxgrad.ClippedGrad(1.0, weights=weights, groups=groups)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(transformed(x)).backward()
    report = fxgrad.result(transformed, clipped)
    left_out = (report.weight == 0).reshape(-1, 5).any(0)
    assert bool(left_out[largest]) and int(report.nonfinite) == int(left_out.sum())
    assert report.weight.reshape(-1, 5)[:, ~left_out].unique().tolist() == [0.5]
    assert not report.weight.reshape(-1, 5)[:, left_out].any()
    for name, g in expected.items():
        grad = model.get_parameter(name).grad
        assert grad is not None and close(grad, 0.5 * g[~left_out].sum(0))


def test_a_function_s_weight_that_is_not_finite_raises_where_asked_for(device: torch.device) -> None:
    model = net(device)
    clipped = fxgrad.ClippedGrad(1.0, weights=lambda n: n * math.nan, nonfinite="raise")
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    with pytest.raises(NonFinite, match="the gradients or the weights of 5 samples hold Inf or NaN"):
        default_loss(transformed(torch.randn(5, 3, device=device, dtype=torch.float64))).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_function_s_weights_may_be_negative(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    clipped = fxgrad.ClippedGrad(1.0, weights=lambda n: -1 / (n + 1))
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(transformed(x)).backward()
    expected = rows(model, x)
    assert int(fxgrad.result(transformed, clipped).nonfinite) == 0
    for name, g in expected.items():
        grad = model.get_parameter(name).grad
        assert grad is not None and close(grad, torch.einsum("n,n...->...", -1 / (norms(expected) + 1), g))


def test_weights_are_rounded_towards_zero() -> None:
    exact = torch.tensor([1 / 3, -1 / 3, 0.1, -0.1, 1e300, -1e300], dtype=torch.float64)
    rounded = at_most(exact, torch.float32).double()
    assert bool((rounded.abs() <= exact.abs()).all()) and bool(rounded.isfinite().all())


@pytest.mark.parametrize("weights", [lambda n: n.sum(), lambda n: n[:1], lambda n: 0.5], ids=["sum", "first", "float"])
def test_a_function_returns_a_weight_for_each_norm(weights: Any, device: torch.device) -> None:
    transformed = fxgrad.transform(net(device), quantity=fxgrad.ClippedGrad(1.0, weights=weights), backend="eager")
    with pytest.raises(OptionError, match=r"weights= returned .* for the norms of 5 samples"):
        default_loss(transformed(torch.randn(5, 3, device=device, dtype=torch.float64))).backward()


# Padding and what is not finite


def test_a_group_that_is_frozen(device: torch.device) -> None:
    """Has norms of zero, and no weight in anything."""
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    model[2].requires_grad_(False)
    clipped = fxgrad.ClippedGrad([0.3, 0.1], groups=[["0.weight", "0.bias"], ["2.weight", "2.bias"]])
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(transformed(x)).backward()
    found = fxgrad.result(transformed, clipped)
    grads = {name: g for name, g in rows(model, x).items() if name.startswith("0.")}
    weight = (0.3 / (norms(grads) + 1e-6)).clamp(max=1)
    assert close(found.norm_sample[0], norms(grads)) and not found.norm_sample[1].any()
    for name, g in grads.items():
        expected = torch.einsum("n,n...->...", weight, g)
        torch.testing.assert_close(model.get_parameter(name).grad, expected, rtol=1e-9, atol=1e-12)


def test_sample_weight_leaves_padding_out(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.0], device=device)
    padded = x.clone()
    padded[2], padded[4] = float("nan"), float("inf")
    clipped = fxgrad.ClippedGrad(0.3, sample_weight=True)
    transformed = fxgrad.transform(model, quantity=clipped, backend="aot_eager")
    default_loss(transformed(padded, sample_weight=weight)).backward()
    c = (0.3 / (norms(expected) + 1e-6)).clamp(max=1) * weight
    for name, p in model.named_parameters():
        assert p.grad is not None and close(p.grad, torch.einsum("n,n...->...", c, expected[name]))
    assert int(fxgrad.result(transformed, clipped).nonfinite) == 0
    fxgrad.zero_grad(transformed)
    default_loss(transformed(x)).backward()
    c = (0.3 / (norms(expected) + 1e-6)).clamp(max=1)
    weight_grad = dict(model.named_parameters())["0.weight"].grad
    assert weight_grad is not None and close(weight_grad, torch.einsum("n,n...->...", c, expected["0.weight"]))


@pytest.mark.parametrize("weight", [torch.ones(4), torch.tensor([1.0, 1, -1, 1, 1]), [1.0] * 5], ids=str)
def test_sample_weight_is_checked(weight: Any, device: torch.device) -> None:
    model = net(device)
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(0.3, sample_weight=True), backend="eager")
    with pytest.raises(OptionError, match="sample_weight has to be"):
        transformed(torch.randn(5, 3, device=device, dtype=torch.float64), sample_weight=weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_weighs_nothing_and_is_counted(dtype: torch.dtype, device: torch.device) -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)).to(device, dtype)
    x = torch.randn(5, 2, 4, device=device, dtype=dtype)
    expected = per_sample_grads(model, default_loss, (x,))
    x[1, 0, 0], x[3] = float("inf"), float("nan")
    clipped = fxgrad.ClippedGrad(0.3)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(transformed(x)).backward()
    report = fxgrad.result(transformed, clipped)
    assert int(report.nonfinite) == 2 and report.weight[[1, 3]].tolist() == [0, 0]
    c = (0.3 / (norms(expected) + 1e-6)).clamp(max=1)
    c[[1, 3]] = 0
    for name, p in model.named_parameters():
        wanted = torch.einsum("n,n...->...", c, expected[name])
        tolerance = 1e-10 if dtype is torch.float64 else 1e-4
        assert p.grad is not None and relative_error({"": p.grad}, {"": wanted}) <= tolerance


def test_raising_leaves_everything_as_it_was(device: torch.device) -> None:
    model = net(device)
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(0.3, nonfinite="raise"), backend="eager")
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    default_loss(transformed(x)).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    x[1] = float("nan")
    with pytest.raises(NonFinite, match="the gradients or the weights of 1 samples hold Inf or NaN"):
        default_loss(transformed(x)).backward()
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True) if p.grad is not None)


# State


def test_the_sum_is_added_to_what_p_grad_holds(device: torch.device) -> None:
    model = net(device)
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(0.3), backend="eager")
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    default_loss(transformed(x)).backward()
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    default_loss(transformed(x)).backward()
    assert all(close(p.grad, 2 * b) for p, b in zip(model.parameters(), once, strict=True) if p.grad is not None)


@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(1.0), fxgrad.NormSample(), fxgrad.SquaredGrad(),
                                      fxgrad.GradVariance(), fxgrad.GradGram()], ids=str)  # fmt: skip
def test_two_forwards_in_one_backward_do_not_add_up(quantity: Any, device: torch.device) -> None:
    model = net(device)
    transformed = fxgrad.transform(model, quantity=quantity, backend="eager")
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    for first, second in ((x, x), (x, x[:2])):
        loss = default_loss(transformed(first)) + default_loss(transformed(second))
        with pytest.raises(AlreadySet, match="two forwards of the model meet in one backward"):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        fxgrad.zero_grad(transformed)
    default_loss(transformed(x)).backward()


@pytest.mark.parametrize("quantity", [fxgrad.GradDot({"0.bias": torch.ones(4)}), fxgrad.GradProjection(3)], ids=str)
def test_linear_quantities_add_up(quantity: Any, device: torch.device) -> None:
    model = net(device)
    transformed = fxgrad.transform(model, quantity=quantity, backend="eager")
    x = torch.randn(2, 5, 3, device=device, dtype=torch.float64)
    each = []
    for part in x:
        default_loss(transformed(part)).backward()
        each.append(fxgrad.result(transformed, quantity).clone())
        fxgrad.zero_grad(transformed)
    (default_loss(transformed(x[0])) + default_loss(transformed(x[1]))).backward()
    assert close(fxgrad.result(transformed, quantity), each[0] + each[1])


def test_norms_are_set_once(device: torch.device) -> None:
    model = net(device)
    transformed = fxgrad.transform(model, quantity=fxgrad.NormSample(), backend="eager")
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    default_loss(transformed(x)).backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(AlreadySet, match=r"a forward while norm_sample of '0\.weight' is still set"):
        transformed(x)
    transformed.zero_grad()
    default_loss(transformed(x)).backward()


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 5.0), (2.0, 2.0)], ids=["mean", "number"])
def test_loss_reduction(reduction: Any, scale: float, device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    clipped = fxgrad.ClippedGrad(0.3)
    transformed = fxgrad.transform(model, quantity=clipped, loss_reduction=reduction, backend="eager")
    (default_loss(transformed(x)) / scale).backward()
    assert close(fxgrad.result(transformed, clipped).norm_sample, norms(expected))


def test_one_backward_through_torch_compile(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = rows(model, x)
    clipped = fxgrad.ClippedGrad(0.3)
    options: dict[str, Any] = {"quantity": clipped, "backend": "eager"}
    compiled = torch.compile(model, backend="fxgrad", options=options)
    default_loss(compiled(x)).backward()
    c = (0.3 / (norms(expected) + 1e-6)).clamp(max=1)
    for name, p in model.named_parameters():
        assert p.grad is not None and close(p.grad, torch.einsum("n,n...->...", c, expected[name]))
    assert close(fxgrad.result(compiled, clipped).norm_sample, norms(expected))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        torch._dynamo.graph_break()
        out: Tensor = self.b(h)
        return out


def test_a_graph_break_is_refused(device: torch.device) -> None:
    x = torch.randn(5, 3, device=device)
    with pytest.raises(OptionError, match=r"ClippedGrad\(1.0\) needs the whole model as one graph"):
        fxgrad.transform(Broken(), quantity=fxgrad.ClippedGrad(1.0), fullgraph=False)
    options: dict[str, Any] = {"quantity": fxgrad.ClippedGrad(1.0), "backend": "eager"}
    compiled = torch.compile(Broken().to(device), backend="fxgrad", options=options)
    with pytest.raises(BackendCompilerFailed, match="needs the whole model as one graph"):
        compiled(x)
    model = Broken().to(device)
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="eager")
    with pytest.raises(GraphBreak, match="does not capture as one graph"):
        transformed(x)


def wrong(function: Any) -> Any:
    return pytest.param(function, id=function.__name__)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fxgrad.ClippedGrad(0.0), "max_grad_norm has to be a positive"),
        (lambda: fxgrad.ClippedGrad([]), "max_grad_norm has to be a positive"),
        (lambda: fxgrad.ClippedGrad(-1.0), "max_grad_norm has to be a positive"),
        (lambda: fxgrad.ClippedGrad(True), "max_grad_norm has to be a positive"),
        (lambda: fxgrad.ClippedGrad(math.nan), "max_grad_norm has to be a positive"),
        (lambda: fxgrad.ClippedGrad([1.0, math.nan], groups="per_parameter"), "max_grad_norm has to be a positive"),
        (lambda: fxgrad.ClippedGrad("1"), "max_grad_norm has to be a positive"),  # type: ignore[arg-type]
        (lambda: fxgrad.ClippedGrad(None), "max_grad_norm has to be a positive"),  # type: ignore[arg-type]
        (lambda: fxgrad.ClippedGrad(math.inf, weights="automatic"), "max_grad_norm=inf needs weights='clip'"),
        (lambda: fxgrad.ClippedGrad([1.0, math.inf], weights="automatic"), "max_grad_norm=inf needs weights='clip'"),
        (lambda: fxgrad.ClippedGrad(math.inf, weights=torch.exp), "max_grad_norm=inf needs weights='clip'"),
        (lambda: fxgrad.ClippedGrad(1.0, weights="automatic", gamma=-0.5), "gamma has to be a positive number"),
        (lambda: fxgrad.ClippedGrad(1.0, weights="automatic", gamma=0.0), "gamma has to be a positive number"),
        (lambda: fxgrad.ClippedGrad(1.0, weights="automatic", gamma=math.nan), "gamma has to be a positive number"),
        (lambda: fxgrad.ClippedGrad(1.0, weights="automatic", gamma=math.inf), "gamma has to be a positive number"),
        (lambda: fxgrad.ClippedGrad(1.0, gamma=True), "gamma has to be a positive number"),
        (lambda: fxgrad.ClippedGrad(1.0, groups="layer"), "groups has to be"),
        (lambda: fxgrad.ClippedGrad(1.0, weights="none"), "weights has to be"),  # type: ignore[arg-type]
        (lambda: fxgrad.ClippedGrad(1.0, nonfinite="keep"), "nonfinite has to be"),  # type: ignore[arg-type]
        (lambda: fxgrad.GradProjection(0), "dim has to be a positive int"),
        (lambda: fxgrad.transform(nn.Linear(2, 2), quantity=[]), "quantity has to be a quantity"),
        (lambda: fxgrad.transform(nn.Linear(2, 2), quantity=3), "quantity has to be a quantity"),  # type: ignore[arg-type]
        (
            lambda: fxgrad.transform(nn.Linear(2, 2), quantity=[fxgrad.Grad(), fxgrad.ClippedGrad(1.0)]),
            r"Grad and ClippedGrad\(1.0\) both write p.grad",
        ),
        (
            lambda: fxgrad.transform(nn.Linear(2, 2), quantity=[fxgrad.NormSample(), fxgrad.NormSample()]),
            "asked for twice",
        ),
        (
            lambda: fxgrad.transform(nn.Linear(2, 2), quantity=fxgrad.ClippedGrad(1.0), mixing="allow"),
            "refuses mixing='allow'",
        ),
    ],
)
def test_options_are_checked(make: Any, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        make()


def test_groups_have_to_cover(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    for groups in ([["0.weight"]], [["0.weight", "0.bias", "2.weight", "2.bias"], ["0.bias"]]):
        transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0, groups=groups), backend="eager")
        with pytest.raises(OptionError, match="groups= has to name every trainable parameter once"):
            transformed(x)


def test_results_have_to_be_asked_for(device: torch.device) -> None:
    model = net(device)
    transformed = fxgrad.transform(model, quantity=fxgrad.NormSample(), backend="eager")
    with pytest.raises(OptionError, match="no backward has run"):
        fxgrad.result(transformed, fxgrad.NormSample())
    with pytest.raises(OptionError, match="transformed for NormSample, not for GradGram"):
        fxgrad.result(transformed, fxgrad.GradGram())
    with pytest.raises(OptionError, match="takes a transformed model"):
        fxgrad.result(model, fxgrad.NormSample())


def test_projections_depend_on_names_and_places_alone(device: torch.device) -> None:
    model = net(device)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    projection = fxgrad.GradProjection(64, seed=1)
    transformed = fxgrad.transform(model, quantity=projection, backend="eager")

    def projected(x: Tensor) -> Tensor:
        default_loss(transformed(x)).backward()
        found: Tensor = fxgrad.result(transformed, projection)
        fxgrad.zero_grad(transformed)
        return found

    whole = projected(x)
    assert close(whole[1:3], projected(x[1:3]))
    assert not close(whole, whole.roll(1, 0))
    wide = fxgrad.GradProjection(4096, seed=1)
    transformed = fxgrad.transform(model, quantity=wide, backend="eager")
    default_loss(transformed(x)).backward()
    ratio = fxgrad.result(transformed, wide).norm(dim=1) / norms(rows(model, x))
    assert bool(((ratio - 1).abs() < 0.1).all())  # Johnson and Lindenstrauss


RATES = {"rate": 1.0}


settings_of: Any = types.ModuleType("settings_of")


class Scaled:
    def __init__(self) -> None:
        self.by, self.steps = 1.0, 0

    def __call__(self, norms: Tensor) -> Tensor:
        return self.by / (norms + 1)

    def of_norms(self, norms: Tensor) -> Tensor:
        return self(norms)


def functions_that_read() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any], str]]:
    number, numbers, scaled = 1.0, [1.0], Scaled()
    array, tensor, objects, long = np.ones(1), torch.ones(()), [scaled], [1.0] * 500
    deep: list[Any] = [{"a": {"b": {"c": 1.0}}}]
    deep.append(deep)

    def change_deep() -> None:
        deep[0]["a"]["b"]["c"] = 0.5

    def change() -> None:
        nonlocal number
        number = 0.5

    def change_module() -> None:
        settings_of.RATE = 0.5

    def halved(norms: Tensor) -> Tensor:
        return numbers[0] / (norms + 1)

    def by_helper(norms: Tensor) -> Tensor:
        return halved(norms) * number

    return {
        "a number of the function around it": (lambda norms: number / (norms + 1), change, "number"),
        "a list": (lambda norms: numbers[0] / (norms + 1), lambda: numbers.append(2.0), "numbers"),
        "a dict of the module": (lambda norms: RATES["rate"] / (norms + 1), lambda: RATES.update(rate=0.5), "RATES"),
        "an attribute": (scaled, lambda: setattr(scaled, "by", 0.5), "self.by"),
        "a function that reads": (by_helper, lambda: numbers.append(2.0), "numbers"),
        "a method": (scaled.of_norms, lambda: setattr(scaled, "by", 0.5), "self.by"),
        "an array": (lambda norms: float(array[0]) / (norms + 1), lambda: array.__setitem__(0, 0.5), "array"),
        "an item of an array": (lambda norms: array.item() / (norms + 1), lambda: array.fill(0.5), "array.item"),
        "an item of a tensor": (lambda norms: tensor.item() / (norms + 1), lambda: tensor.fill_(0.5), "tensor.item"),
        "a dict in dicts in a list": (lambda norms: deep[0]["a"]["b"]["c"] / (norms + 1), change_deep, "deep"),
        "an object in a list": (
            lambda norms: objects[0].by / (norms + 1),
            lambda: setattr(scaled, "by", 0.5),
            "objects",
        ),
        "the end of a long list": (lambda norms: long[-1] / (norms + 1), lambda: long.__setitem__(-1, 0.5), "long"),
        "a number of another module": (lambda norms: settings_of.RATE / (norms + 1), change_module, "settings_of.RATE"),
    }


@pytest.mark.parametrize("what", functions_that_read())
def test_what_weights_read_has_to_stay(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced once: a number that changes would have no effect."""
    monkeypatch.setitem(RATES, "rate", 1.0)
    settings_of.RATE = 1.0
    weights, change, name = functions_that_read()[what]
    model = nn.Linear(3, 2)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0, weights=weights), backend="eager")
    for _ in range(2):
        model.zero_grad()
        private(torch.ones(4, 3)).sum().backward()
    change()
    with pytest.raises(OptionError, match=f"'{name}', which [a-zA-Z_. ]+ reads, is not what it was"):
        private(torch.ones(4, 3))
    again = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0, weights=weights), backend="eager")
    again(torch.ones(4, 3))


def test_what_weights_do_not_read_may_change() -> None:
    scaled, model, seen = Scaled(), nn.Linear(3, 2), []

    def weights(norms: Tensor) -> Tensor:
        seen.append(norms)
        return scaled(norms)

    for function in (scaled, weights, scaled.__call__):
        quantity = fxgrad.ClippedGrad(1.0, weights=function)
        private = fxgrad.transform(model, quantity=quantity, backend="eager")
        for _ in range(3):
            scaled.steps += 1
            model.zero_grad()
            private(torch.ones(4, 3)).sum().backward()
