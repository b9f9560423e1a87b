"""‖c g‖ <= C (1 + 1e-5) where what is added up takes itself back: sums that rules make, functions of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import MixedSamples
from fxgrad.kernels import on_gpu
from fxgrad.kernels.norms import gamma
from fxgrad.kernels.tables import _by_sorting, rounding_of_rows, row_norms
from fxgrad.terms import OneHot, Term
from tests.programs import quick_dynamo
from tests.quick import long_but

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
T, D, C = 66, 6, 1e-3
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


class Of(nn.Module):
    """A function of parameters and of the input."""

    def __init__(self, function: Function, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.rand(shape) + 0.5 for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *list(self.weights))  # Dynamo of 2.12 unpacks no ParameterList


def _places(x: Tensor) -> Tensor:
    """Indices below 7 that depend on the sample."""
    return x[..., :1].abs().long() % 7


def _often(x: Tensor, copies: Tensor) -> Tensor:
    return torch.stack([(copies * x[:, i : i + 1]).sum(1) for i in range(T)], 1)


SUMS: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (D,), w, b), [(D,), (D,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (D,), w), [(D,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x.mT.unsqueeze(-1), 2, w, b).squeeze(-1).mT, [(D,), (D,)]),
    "bias": (lambda x, b: F.linear(x, torch.eye(D, device=x.device, dtype=x.dtype), b), [(D,)]),
    "scale": (lambda x, w: x * w, [(D,)]),
    "scale of one element": (lambda x, w: x * w, [(1,)]),
    "shift": (lambda x, w: x + w, [(D,)]),
    "elementwise": (lambda x, w: torch.addcmul(x, x, w, value=2.0).abs(), [(D,)]),
    "prelu": (lambda x, w: F.prelu(-x.abs(), w), [(1,)]),
    "expand": (lambda x, w: w.expand(len(x), T, D) + x, [(D,)]),
    "repeat": (lambda x, w: w.repeat(len(x), T, 1) + x, [(1, D)]),
    "a batch of matrices": (lambda x, w: x.unflatten(1, (2, -1)) @ w, [(1, D, D)]),
    "a matrix on the left": (lambda x, w: (w @ x.unflatten(1, (-1, 2)).mT.mT.mT).flatten(1, 2), [(1, D, D)]),
    "bilinear": (lambda x, w, b: F.bilinear(x, x[..., :2].contiguous(), w, b), [(D, D, 2), (D,)]),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=1), [(D, D)]),
    "einsum with a letter of the weight alone": (lambda x, w: torch.einsum("btd,dez->bte", x, w), [(D, D, 3)]),
    "einsum with dots": (lambda x, w: torch.einsum("...d,ed->...e", x, w), [(D, D)]),
    "einsum of a diagonal": (lambda x, w: torch.einsum("btd,dd->btd", x, w), [(D, D)]),
    "gather of copies": (lambda x, w: w.expand(len(x), 7, D).gather(1, _places(x).expand(-1, -1, D)), [(7, D)]),
    "gather of copies at the same places": (
        lambda x, w: w.expand(len(x), 7, D).gather(1, torch.zeros(len(x), T, D, dtype=torch.long, device=x.device)) + x,
        [(7, D)],
    ),
    "copies at places": (
        lambda x, w: w.expand(len(x), 7, D)[torch.arange(len(x), device=x.device)[:, None], _places(x)[..., 0]],
        [(7, D)],
    ),
    "copies at a list of places": (lambda x, w: w.expand(len(x), 7, D)[:, [0, 2] * (T // 2)] + x, [(7, D)]),
    "copies selected": (
        lambda x, w: w.expand(len(x), 7, D).index_select(1, torch.zeros(T, dtype=torch.long, device=x.device)) + x,
        [(7, D)],
    ),
    "copies repeated": (lambda x, w: w.repeat(len(x), 1, 1).gather(1, _places(x).expand(-1, -1, D)), [(1, 7, D)]),
    "copies multiplied": (lambda x, w: torch.bmm(x, w.expand(len(x), D, D)), [(D, D)]),
    "copies read often": (lambda x, w: _often(x, w.expand(len(x), T, D)), [(D,)]),
    "take_along_dim": (lambda x, w: w.take_along_dim(_places(x).flatten()).view(len(x), T, 1) + x, [(7,)]),
    "einsum": (lambda x, w: torch.einsum("btd,de->bte", x, w), [(D, D)]),
}
FUNCTIONS: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "a scaled weight": (lambda x, w, s: F.linear(x, w * s), [(D, D), (1,)]),
    "weight norm": (lambda x, v, g: F.linear(x, v / v.norm(dim=1, keepdim=True) * g), [(D, D), (D, 1)]),
    "low rank": (lambda x, a, b: F.linear(x, a @ b), [(D, 2), (2, D)]),
    "steep": (lambda x, w: F.linear(x, (20 * w).exp()), [(D, D)]),
    "a scaled shift": (lambda x, w: x + 3 * w, [(D,)]),
    "one plus a scale": (lambda x, w: x * (1 + w), [(D,)]),
    "one plus a norm's scale": (lambda x, w: F.layer_norm(x, (D,), 1 + w), [(D,)]),
    "a scaled slope": (lambda x, w: F.prelu(-x.abs(), w * 1.5), [(1,)]),
    "a transposed weight": (lambda x, w: F.linear(x, w.t()), [(D, D)]),
    "a scaled scale, transposed": (lambda x, w: F.linear(x, (w * 2).t()), [(D, D)]),
}
EVERY = SUMS | FUNCTIONS


def swamped(kind: str, device: torch.device, k: int = T) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of three samples; in float32 what is large takes what is small with it."""
    x = torch.randn(3, k, D, device=device)
    x[:, 1::2] = x[:, :1]
    x[:, ::2] = x[:, :1]
    g = torch.ones(3, k, D, device=device)
    if kind == "large ends":
        g[:, 0], g[:, -1] = 2.0**27, -(2.0**27)
    elif kind == "pairs":
        g = torch.randn(3, k, D, device=device) * 1e6
        g[:, 1::2] = -g[:, ::2] * (1 + 2**-22)
    else:
        x, g = torch.rand_like(x), torch.rand_like(g)
    return x, g


def exact(model: Of, x: Tensor, g: Tensor) -> Tensor:
    """The norm of every sample's gradient in float64, from the same numbers."""
    weights = [w.detach().double().requires_grad_() for w in model.weights]
    norms = []
    for one, its in zip(x.double(), g.double(), strict=True):
        y = model.function(one.unsqueeze(0), *weights)
        grads = torch.autograd.grad((y * its.reshape(y.shape)).sum(), weights)
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm())
    return torch.stack(norms)


def weights(transformed: Any, quantity: fxgrad.ClippedGrad, x: Tensor, g: Tensor) -> Tensor:
    """What each sample's gradient was multiplied by."""
    y = transformed(x)
    (y * g.reshape(y.shape)).sum().backward()
    found: Tensor = fxgrad.result(transformed, quantity).weight.double()
    fxgrad.zero_grad(transformed)
    return found


@pytest.mark.parametrize("name", EVERY)
def test_the_bound(name: str, device: torch.device) -> None:
    """And where nothing cancels, nothing is given away."""
    torch.manual_seed(0)
    function, shapes = EVERY[name]
    model, clipped = Of(function, *shapes).to(device), fxgrad.ClippedGrad(C)
    beside = [fxgrad.GradSample()] if name in ("layer_norm", "scale", "weight norm", "steep") else []
    transformed = fxgrad.transform(model, quantity=[clipped, *beside], backend="eager")
    for kind in ("large ends", "pairs"):
        x, g = swamped(kind, device)
        weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
        assert bool((weight > 0).all())
        assert bool((weight * norms <= C * (1 + 1e-5)).all()), (kind, weight * norms / C)
    x, g = swamped("plain", device)
    weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
    assert bool(((weight * (norms + 1e-6) / C - 1).abs() <= 1e-3).all()), weight * norms / C


@pytest.mark.parametrize("name", ["layer_norm", "scale", "a scaled weight", "einsum"])
def test_groups_of_rows(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    function, shapes = EVERY[name]
    model = Of(function, *shapes).to(device)
    x, g = swamped("pairs", device)
    x, g = torch.cat([x[:2]] * 2), torch.cat([g[:2], -g[:2] * (1 + 2**-21)])
    order = [0, 2, 1, 3]  # one takes the other of its group back
    x, g = x[order], g[order]
    norms = exact(model, x.unflatten(0, (2, 2)).flatten(1, 2), g.unflatten(0, (2, 2)).flatten(1, 2))
    clipped = fxgrad.ClippedGrad(C, group_size=2)
    weight = weights(fxgrad.transform(model, quantity=clipped, backend="eager"), clipped, x, g)
    assert bool((weight * norms <= C * (1 + 1e-5)).all()), weight * norms / C


def test_half_types(device: torch.device) -> None:
    """Products of bfloat16 are exact in float32, where they are added up."""
    torch.manual_seed(0)
    for name in ("layer_norm", "scale", "shift"):
        function, shapes = EVERY[name]
        model = Of(function, *shapes).to(device, torch.bfloat16)
        x, g = (value.bfloat16() for value in swamped("pairs", device))
        if name == "layer_norm":  # what is normalised is rounded, and taken as it is
            x = x.sign()
        norms = exact(model, x, g)
        clipped = fxgrad.ClippedGrad(C)
        weight = weights(fxgrad.transform(model, quantity=clipped, backend="eager"), clipped, x, g)
        assert bool((weight * norms <= C * (1 + 1e-5)).all()), (name, weight * norms / C)


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_of_one(name: str, device: torch.device) -> None:
    """A Poisson batch of one is a batch: autograd's own sum would be up to 1e6 C long."""
    torch.manual_seed(0)
    function, shapes = EVERY[name]
    model, clipped = Of(function, *shapes).to(device), fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    for kind in ("large ends", "pairs", "plain"):
        x, g = (value[:1] for value in swamped(kind, device))
        weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
        y = transformed(x)
        (y * g.reshape(y.shape)).sum().backward()
        length = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm()
        assert float(length) <= C * (1 + 1e-5), kind
        fxgrad.zero_grad(transformed)
        assert bool((weight > 0).all())
        assert bool((weight * norms <= C * (1 + 1e-5)).all()), (kind, weight * norms / C)
    assert bool(((weight * (norms + 1e-6) / C - 1).abs() <= 1e-3).all()), weight * norms / C


ALONE: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "an image alone": (lambda x, w: F.conv1d(x[0].T, w).T, [(4, D, 1)]),
    "a vector from the right": (lambda x, w: w @ x[0].sum(0), [(4, D)]),
    "a linear layer of a vector": (lambda x, w, b: F.linear(x[0, 0], w, b), [(4, D), (4,)]),
    "a bias written in place": (lambda x, b: x.squeeze(0).clone().add_(b), [(D,)]),
    "a parameter written into the sample": (lambda x, w: _filled(x, w), [(D,)]),
    "dropout of a parameter": (lambda x, w: x[0] * F.dropout(w, 0.0), [(D,)]),
    "the loss inside": (lambda x, w: w * (x * w).sum(), [(D,)]),
    "a lookup": (lambda x, w: w[x[0, :, 0].long() % 5] * x[0, :, :1], [(5, D)]),
}


def _filled(x: Tensor, w: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[:, 0] = w
    made[:, 1] = x[:, 1] * w
    return made.squeeze(0)


@pytest.mark.parametrize("name", ALONE)
def test_a_batch_of_one_without_its_dimension(name: str, device: torch.device) -> None:
    """What a model may do to a batch of one alone: nothing says where the sample is, and nothing has to."""
    torch.manual_seed(0)
    function, shapes = ALONE[name]
    model = Of(function, *shapes).to(device)
    for quantity in (fxgrad.ClippedGrad(1e9), fxgrad.ClippedGrad(C)):
        x = torch.randn(1, T, D, device=device)
        transformed = fxgrad.transform(model, quantity=quantity, backend="eager")
        y = transformed(x)
        g = torch.randn_like(y)
        (y * g).sum().backward()
        weight = fxgrad.result(transformed, quantity).weight
        found = [p.grad.clone() for p in model.weights if p.grad is not None]
        fxgrad.zero_grad(transformed)
        expected = torch.autograd.grad((model(x) * g).sum(), list(model.weights))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, weight * theirs, rtol=1e-4, atol=1e-9)
    norm = torch.cat([grad.double().flatten() for grad in expected]).norm()
    assert float(weight * norm) <= C * (1 + 1e-5)


def test_statistics_of_a_batch_of_one_are_refused(device: torch.device) -> None:
    """Its running statistics are those that later samples are normalised with."""
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(T)).to(device)
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    with pytest.raises(MixedSamples, match="batch_norm in training mode lets samples influence each other"):
        transformed(torch.randn(1, T, D, device=device))
    transformed.eval()(torch.randn(1, T, D, device=device)).sum().backward()


def test_products_of_entries_round_as_their_absolute_values_say(device: torch.device) -> None:
    g, x = torch.randn(2, 3, 4, 5, 6, device=device)
    found = Term("nkc...,nkc...->nc", g, x).rounding()
    expected = 1.01 * gamma(4 * 6, torch.float32) * (g * x).abs().double().sum((1, 3)).norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_what_is_neither_multiplied_nor_added_up_is_not_rounded(device: torch.device) -> None:
    g = torch.randn(5, 1, 7, device=device)
    assert Term("n...o->no", g).rounding().equal(torch.zeros(5, dtype=torch.float64, device=device))
    assert (Term("n...o->no", g.expand(5, 2, 7)).rounding() > 0).all()
    assert (Term("n...o,n...o->no", g, g).rounding() > 0).all()


def one_that_takes_all(k: int, device: torch.device) -> Tensor:
    """Output gradients the first of which takes all others with it where they are added one after another."""
    g = torch.full((3, k, D), 2.0**-25, device=device)
    g[:, 0] = 1
    return g


LONG = ["layer_norm", "group_norm", "bias", "scale", "prelu", "einsum", "a transposed weight"]


@pytest.mark.parametrize("name", long_but(lambda name: name == "einsum", LONG))
def test_long_sums(name: str, device: torch.device) -> None:
    """Compilers add up thousands of numbers one after another; also where the length changes from call to call."""
    torch.manual_seed(0)
    function, shapes = EVERY[name]
    model, clipped = Of(function, *shapes).to(device), fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped)
    for k in (40, 24, 5000):
        x, g = torch.randn(3, 1, D, device=device).expand(3, k, D).contiguous(), one_that_takes_all(k, device)
        weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
        assert bool((weight * norms <= C * (1 + 1e-5)).all()), (k, weight * norms / C)
        assert bool((weight * (norms + 1e-6) >= C * (1 - 1e-3)).all()), (k, weight * norms / C)
    x, g = swamped("pairs", device, 1200)
    weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
    assert bool((weight * norms <= C * (1 + 1e-5)).all()), weight * norms / C


def test_sums_of_several_uses(device: torch.device) -> None:
    """The second use takes the first one's gradient back: what is left is what rounding took from the others."""
    model = Of(lambda x, w: x[..., :1] * w + x[..., 1:2] * w + x[..., 2:3] * w, (D,)).to(device)
    clipped = fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    x = torch.ones(3, 1, D, device=device)
    x[..., 0], x[..., 1], x[..., 2] = 2.0**24 + 2, -(2.0**24), 0.75
    g = torch.ones(3, 1, D, device=device)
    weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
    assert bool((weight * norms <= C * (1 + 1e-5)).all()), weight * norms / C


def test_complex_products_for_a_real_parameter(device: torch.device) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, -x) * torch.complex(w, w)).sum(-1)

    model, clipped = Of(function, (D,)).to(device), fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    for kind in ("large ends", "pairs"):
        x, g = swamped(kind, device)
        weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
        assert bool((weight > 0).all())
        assert bool((weight * norms <= C * (1 + 1e-5)).all()), (kind, weight * norms / C)


def rows_of_one_id(k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids, and rows the first of which takes all others with it where they are added one after another."""
    g = torch.full((3, k, 8), 2.0**-25, device=device)
    g[:, 0] = 1
    return torch.ones(3, k, dtype=torch.long, device=device), g


@pytest.mark.parametrize("strategy", ["materialise", "rows"])
@pytest.mark.parametrize("k", [64, 8192])
def test_rows_of_one_id(strategy: str, k: int, device: torch.device) -> None:
    """A table adds its rows up one after another, however many there are."""
    ids, g = rows_of_one_id(k, device)
    model, clipped = nn.Embedding(3, 8, device=device), fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, strategy=strategy, backend="eager")
    for these, rows in ((ids, g), (ids[:, :40] * torch.arange(40, device=device) % 3, torch.randn_like(g[:, :40]))):
        (transformed(these) * rows).sum().backward()
        weight = fxgrad.result(transformed, clipped).weight.double()
        fxgrad.zero_grad(transformed)
        norms = Term("n...v,n...d->nvd", OneHot(these, 3), rows.double()).dense().flatten(1).norm(dim=1)
        assert bool((weight * norms <= C * (1 + 1e-5)).all()), weight * norms / C
    assert bool(((weight * (norms + 1e-6) / C - 1).abs() <= 1e-3).all())


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("beside", [False, True])
def test_rows_that_float32_loses(group: int, beside: bool, device: torch.device) -> None:
    """What float64 finds of them says nothing of the rows that float32 has added up."""
    g = torch.ones(4, 256, 64, device=device)
    g[:, 0], g[:, -1] = 2.0**27, -(2.0**27)
    clipped = fxgrad.ClippedGrad(C, group_size=group)
    quantity = [clipped, fxgrad.GradSample()] if beside else clipped
    transformed = fxgrad.transform(nn.Embedding(3, 64, device=device), quantity=quantity, backend="eager")
    (transformed(torch.zeros(4, 256, dtype=torch.long, device=device)) * g).sum().backward()
    weight = fxgrad.result(transformed, clipped).weight.double()
    assert bool((weight > 0).all())
    assert bool((weight * group * g[0].double().sum(0).norm() <= C * (1 + 1e-5)).all())


def test_rows_of_one_id_by_sorting(device: torch.device) -> None:
    ids, g = rows_of_one_id(8192, device)
    norms = Term("n...v,n...d->nvd", OneHot(ids, 3), g.double()).dense().flatten(1).norm(dim=1)
    assert bool((_by_sorting(ids, g, -1)[1] >= norms).all())


def test_the_real_part_is_what_is_clipped(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Of(lambda x, w: torch.view_as_real(x.to(torch.complex64) * (1 + 2j) * w.to(torch.complex64)).sum(-1), (D,))
    clipped = fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model.to(device), quantity=clipped, backend="eager")
    x, g = swamped("plain", device)
    weight, norms = weights(transformed, clipped, x, g), exact(model, x, g)
    assert bool(((weight * (norms + 1e-6) / C - 1).abs() <= 1e-3).all()), weight * norms / C


SCALED: dict[str, Function] = {
    "a scaled shift": lambda x, w: x + 3 * w,
    "one plus a scale": lambda x, w: x * (1 + w),
    "a scaled weight": lambda x, w: F.linear(x, w.diag() * 2),
    "addmm": lambda x, w: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), w.diag() * 2, alpha=0.3).view_as(x),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("reduction", ["mean", 7.0])
def test_no_factor_is_rounded_for_the_loss(name: str, reduction: Any, device: torch.device) -> None:
    """What is left of these gradients is less than three times them would be rounded by."""
    model, clipped = Of(SCALED[name], (D,)).to(device), fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, loss_reduction=reduction, backend="eager")
    x, g = torch.ones(3, 3, D, device=device), torch.tensor([13074667.0, -16026538.0, 2951872.0], device=device)
    g = g.view(1, 3, 1).expand_as(x).contiguous()
    scale = 3 if reduction == "mean" else reduction
    weight, norms = weights(transformed, clipped, x, g), exact(model, x, g) * scale
    assert bool((weight * norms <= C * (1 + 1e-5)).all()), weight * norms / C
    assert bool((weight * norms >= C * (1 - 1e-2)).all()), weight * norms / C


def pairs_apart(k: int, device: torch.device, scale: float = 1e6) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients whose products take each other back exactly, but not in the order of a sum."""
    x, g = torch.randn(3, k // 2, D, device=device), torch.randn(3, k // 2, D, device=device) * scale
    order = torch.randperm(k, device=device)
    return torch.cat([x, x], 1)[:, order], torch.cat([g, -g], 1)[:, order]


def left_alone(transformed: nn.Module, x: Tensor, g: Tensor) -> float:
    """The longest p.grad, over C, where one sample of the batch has a gradient and the others have none."""
    lengths = []
    for i in range(len(g)):
        only = torch.zeros_like(g)
        only[i] = g[i]
        y = transformed(x)
        (y * only.reshape(y.shape)).sum().backward()
        grads = [p.grad.double().norm() for p in transformed.parameters() if p.grad is not None]
        lengths.append(float(torch.stack(grads).norm()) / C)
        fxgrad.zero_grad(transformed)
    return max(lengths)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)


THROUGH: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "a scaled weight": (lambda x, w: F.linear(x, 2 * w), [(D, D)]),
    "exp": (lambda x, w: F.linear(x, w.exp()), [(D, D)]),
    "a product of two": (lambda x, w, v: x @ (w * v), [(D, D), (D, D)]),
    "a square": (lambda x, w: x @ (w @ w.t()), [(D, D)]),
    "cumsum": (lambda x, w: x @ w.cumsum(0), [(D, D)]),
    "transposed before and after": (lambda x, w: x @ (w.t() * 2).t(), [(D, D)]),
    "also by itself": (lambda x, w: x @ w.exp() + x @ w, [(D, D)]),
    "a scaled table": (lambda x, w: x + (2 * w)[_zeros(x)], [(5, D)]),
    "gather of copies": (lambda x, w: w.expand(len(x), 5, D).gather(
        1, _zeros(x).unsqueeze(2).expand_as(x)) + x, [(5, D)]),
    "a scaled kernel": (lambda x, w: F.conv1d(x.mT, 2 * w).mT, [(D, D, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("k", [64, 1024])
@pytest.mark.parametrize("name", THROUGH)
def test_what_is_pulled_back_leaves_no_more_than_its_norm_says(name: str, k: int, device: torch.device) -> None:
    """A sum that float32 rounds is no part of a norm that float64 found to be nothing."""
    torch.manual_seed(0)
    function, shapes = THROUGH[name]
    clipped = fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(Of(function, *shapes).to(device), quantity=clipped, backend="eager")
    assert left_alone(transformed, *pairs_apart(k, device)) <= 1 + 1e-5


@pytest.mark.parametrize("strategy", ["gram", "recompute", "materialise"])
@pytest.mark.parametrize("scale", [1e6, 1e20])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_norm_found_in_float64_bounds_a_sum_in_float32(
    kind: str, scale: float, strategy: str, device: torch.device
) -> None:
    """Squares that float32 could not hold are computed again, and what is delivered is rounded as before."""
    torch.manual_seed(0)
    function: Function = (lambda x, w: F.linear(x, w)) if kind == "linear" else (lambda x, w: F.conv1d(x.mT, w).mT)
    model = Of(function, (D, D) if kind == "linear" else (D, D, 1)).to(device)
    given = {"weights.0": strategy}
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), strategy=given, backend="eager")
    assert left_alone(transformed, *pairs_apart(64, device, scale)) <= 1 + 1e-5


def test_a_table_measured_again_in_float64(device: torch.device) -> None:
    ids, g = torch.zeros(3, 64, dtype=torch.long, device=device), pairs_apart(64, device, 1e30)[1]
    found = row_norms(ids, g, 3, -1)
    assert bool((found[1] >= rounding_of_rows(ids, g, 3, -1)).all())


@pytest.mark.parametrize("size", [1, 3])
def test_no_derivative_of_a_function_makes_nan_of_no_sample(size: int, device: torch.device) -> None:
    """√w at 0: every sample's gradient is infinite, and weighs 0."""
    model, clipped = Of(lambda x, w: F.linear(x, (w - w).sqrt()), (D, D)).to(device), fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    transformed(torch.ones(size, D, device=device)).sum().backward()
    assert fxgrad.result(transformed, clipped).nonfinite == size
    assert [bool(p.grad.any()) for p in model.parameters() if p.grad is not None] == [False]


def test_weights_of_a_wider_dtype_are_rounded_down(device: torch.device) -> None:
    """The first parameter is float64, the second takes a weight of 0.8 times float32's smallest number."""
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(1, dtype=torch.float64, device=device))
    model.narrow = nn.Parameter(torch.ones(D, device=device))
    model.forward = lambda x: x * model.narrow + (x * 0).double().mul(model.wide).float()
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1e-10), backend="eager")
    g = torch.zeros(2, D, device=device)
    g[0, 0] = 1.25e35
    transformed(torch.ones(2, D, device=device)).backward(g)
    assert float(torch.linalg.vector_norm(model.narrow.grad, dtype=torch.float64)) <= 1e-10 * (1 + 1e-5)


WIDE_VALUES: dict[str, Function] = {
    "copies times a number": lambda x, w: x + w.expand(len(x), D) * torch.full((), 1.0039, device=x.device),
    "addcmul": lambda x, w: torch.addcmul(x, w, torch.full((), 1.0039, device=x.device)),
    "added in place": lambda x, w: torch.zeros_like(x).addcmul_(torch.full_like(x, 1.0039, dtype=torch.float32), w),
}


@pytest.mark.parametrize("name", WIDE_VALUES)
def test_values_wider_than_what_an_op_returns(name: str, device: torch.device) -> None:
    """1.0039 is 1 in bfloat16, and no such thing happens to it in an op that returns bfloat16."""
    torch.manual_seed(0)
    model, clipped = Of(WIDE_VALUES[name], (D,)).to(device, torch.bfloat16), fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    x, g = torch.ones(3, D, dtype=torch.bfloat16, device=device), torch.randn(3, D, device=device).bfloat16()
    weight = weights(transformed, clipped, x, g)
    assert bool((weight * g.double().norm(dim=1) * 1.0039 <= C * (1 + 1e-5)).all())


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_bounds_count_what_factors_are_rounded_to(setting: str) -> None:
    """As a GPU rounds them, or a CPU with bfloat16 units."""
    torch.manual_seed(0)
    g, x = torch.randn(5, 40, 3), torch.randn(5, 40, 4)
    digits = {"high": 11, "medium": 8}[setting]

    def rounded(value: Tensor) -> Tensor:
        mantissa, exponent = value.frexp()
        return (mantissa * 2.0**digits).round().ldexp(exponent - digits)

    exact = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    made = (rounded(g).double().mT @ rounded(x).double()).flatten(1).norm(dim=1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        bounds = [on_gpu.product_norms(g, x, gram)[1] for gram in (False, True)]
    finally:
        torch.set_float32_matmul_precision(before)
    for bound in bounds:
        assert (bound - exact >= (made - exact).abs()).all() and (bound <= 1.2 * exact).all()
