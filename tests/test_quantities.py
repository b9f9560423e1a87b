"""Every quantity against the loop over single samples, for every rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.testing import default_loss, per_sample_grads, relative_error
from tests.cases import CONVOLUTIONS, EINSUMS, LOOKUPS, NORMS, PRODUCTS, Case
from tests.programs import quick_dynamo
from tests.quick import long_but
from tests.test_rules import CASES, FIRST, by_name, every_case

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


FACTORED = [case for case in FIRST if case in PRODUCTS + EINSUMS + CONVOLUTIONS + LOOKUPS + NORMS]
"""One case for every op whose gradient stays in factors."""


def flat(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(len(g), -1) for g in grads.values()], 1)


def weights(norms: Tensor, c: float) -> Tensor:
    return (c / (norms + 1e-6)).clamp(max=1)


def weighted(c: Tensor, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.einsum("n,n...->...", c, g) for name, g in grads.items()}


def check(model: nn.Module, *inputs: Any, backend: str = "eager", tolerance: float | None = None) -> None:
    """All quantities of one backward against what the loop's gradients say."""
    bound = tolerance or 1e-10
    expected = per_sample_grads(model, default_loss, inputs)
    rows = flat(expected)
    c = float(rows.norm(dim=1).median()) or 1.0
    vectors = {name: torch.randn_like(g[:2]) for name, g in expected.items()} if len(rows) > 1 else {}
    clipped, norms, dots, gram = (
        fxgrad.ClippedGrad(c),
        fxgrad.NormSample(),
        fxgrad.GradDot(vectors),
        fxgrad.GradGram(),
    )
    projection = fxgrad.GradProjection(7, seed=3)
    quantities = [clipped, norms, dots, gram, projection, fxgrad.SquaredGrad(), fxgrad.GradVariance()]
    transformed = fxgrad.transform(model, quantity=quantities, backend=backend)
    try:
        default_loss(transformed(*inputs)).backward()
        found = dict(model.named_parameters())

        def close(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
            assert relative_error(dict(actual), dict(wanted)) <= bound

        def on_parameters(attribute: str, of: Callable[[Tensor], Tensor]) -> None:
            actual = {name: getattr(found[name], attribute) for name in expected}
            close(actual, {name: of(g) for name, g in expected.items()})

        on_parameters("norm_sample", lambda g: g.reshape(len(g), -1).norm(dim=1))
        on_parameters("squared_grad_sum", lambda g: g.square().sum(0))
        if len(rows) > 1:
            for name, g in expected.items():  # of equal gradients it is 0, and rounding is not
                off = (found[name].grad_variance - g.var(0)).abs().max()  # type: ignore[attr-defined]
                assert float(off) <= bound * float(g.square().max() + 1e-300)
        close({"": fxgrad.result(transformed, norms)}, {"": rows.norm(dim=1)})
        close({"": fxgrad.result(transformed, gram)}, {"": rows @ rows.t()})
        if vectors:
            close({"": fxgrad.result(transformed, dots)}, {"": rows @ flat(vectors).t()})
        report = fxgrad.result(transformed, clipped)
        close({"": report.norm_sample}, {"": rows.norm(dim=1)})
        close({"": report.weight}, {"": weights(rows.norm(dim=1), c)})
        clipped_sums = {name: p.grad for name, p in found.items() if p.grad is not None}
        close(clipped_sums, weighted(weights(rows.norm(dim=1), c), expected))
        assert int(report.nonfinite) == 0
    finally:
        fxgrad.zero_grad(transformed)


@every_case
def test_every_rule(case: Case, device: torch.device) -> None:
    check(case.model(device), *case.inputs(device, case.extra[-1]), tolerance=case.tolerance)


@pytest.mark.parametrize("case", FACTORED, ids=by_name)
def test_traced(case: Case, device: torch.device) -> None:
    check(case.model(device), *case.inputs(device, case.extra[0]), backend="aot_eager", tolerance=case.tolerance)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_ordinary_gradient_of_two_calls(backend: str) -> None:
    layer: Any = nn.Linear(3, 2).double()
    a, b = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    F.cosine_similarity(layer(a), layer(b)).sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    model = fxgrad.transform(layer, quantity=[fxgrad.Grad(), fxgrad.GradSample()], backend=backend)
    F.cosine_similarity(model(a), model(b)).sum().backward()
    for p, g in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
        torch.testing.assert_close(p.grad_sample.sum(0), g)


def test_no_case_is_left_out() -> None:
    assert len(CASES) > 250


class Tied(nn.Module):
    """An embedding whose table is the head, and a layer that is called twice."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=padding_idx)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layer(self.table(ids).tanh())
        h = self.norm(self.layer(h.tanh()))
        return F.linear(h, self.table.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(4, 5, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Virtual(nn.Module):
    """Functions of parameters, one of which is used as it is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4))
        self.scale = nn.Parameter(torch.randn(5, 1))
        self.bilinear = nn.Bilinear(5, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        normal = F.normalize(self.w, dim=1) * self.scale
        y = F.linear(x, normal).sin() @ self.w
        out: Tensor = self.bilinear(F.linear(y, self.w), x)
        return out


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, groups=4, dilation=2),
        nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(5, 6)),
    "long sequence": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(5, 17, 3)),
    "conv": lambda: (conv_net(), torch.randn(5, 3, 12, 12)),
    "tied": lambda: (Tied(), torch.randint(11, (5, 7))),
    "tied, padded": lambda: (Tied(padding_idx=3), torch.randint(11, (5, 7))),
    "attention": lambda: (Attention(), torch.randn(5, 4, 6)),
    "lstm": lambda: (Recurrent("LSTM"), torch.randn(5, 7, 4)),
    "virtual": lambda: (Virtual(), torch.randn(5, 4)),
}
every_family = pytest.mark.parametrize("name", FAMILIES)


def family(name: str, device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = FAMILIES[name]()
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        model(x)
    return model.to(device, dtype), x.to(device, dtype) if x.is_floating_point() else x.to(device)


@every_family
@pytest.mark.parametrize(
    ("batch", "backend"), [(5, "aot_eager"), pytest.param(1, "eager", marks=pytest.mark.long)], ids=["5", "1"]
)
def test_families(name: str, batch: int, backend: str, device: torch.device) -> None:
    model, x = family(name, device)
    check(model, x[:batch], backend=backend)


@pytest.mark.inductor
@pytest.mark.parametrize("name", long_but(lambda name: name == "mlp", ["mlp", "conv", "tied"]))
def test_families_through_inductor(name: str, device: torch.device) -> None:
    model, x = family(name, device, torch.float32)
    check(model, x, backend="inductor", tolerance=2e-4)


def test_batch_sizes(device: torch.device) -> None:
    model, _ = family("conv", device)
    clipped = fxgrad.ClippedGrad(0.5)
    transformed = fxgrad.transform(model, quantity=clipped, backend="aot_eager")
    for size in (5, 7, 1, 0, 4, 0, 1):
        x = torch.randn(size, 3, 12, 12, device=device, dtype=torch.float64)
        expected = per_sample_grads(model, default_loss, (x,)) if size else {}
        default_loss(transformed(x)).backward()
        assert fxgrad.result(transformed, clipped).norm_sample.shape == (size,)
        for name, p in model.named_parameters():
            assert p.grad is not None
            wanted = weighted(weights(flat(expected).norm(dim=1), 0.5), expected)[name] if size else torch.zeros_like(p)
            assert relative_error({name: p.grad}, {name: wanted}) <= 1e-10
        fxgrad.zero_grad(transformed)


@every_family
def test_groups_of_rows(name: str, device: torch.device) -> None:
    """Three rows are one sample: the sum of their gradients is clipped, and every result has B / 3 rows."""
    model, x = family(name, device)
    x = torch.cat([x, x[:1]] if x.is_floating_point() else [x, x[:1].flip(1)])
    expected = {n: g.unflatten(0, (2, 3)).sum(1) for n, g in per_sample_grads(model, default_loss, (x,)).items()}
    norms = flat(expected).norm(dim=1)
    c = float(norms.mean())
    clipped, samples = fxgrad.ClippedGrad(c, group_size=3), fxgrad.GradSample(group_size=3)
    alone = name in ("conv", "tied", "lstm")  # else beside one that multiplies everything out
    quantities: list[Any] = [clipped] if alone else [clipped, samples, fxgrad.NormSample()]
    transformed = fxgrad.transform(model, quantity=quantities, backend="aot_eager")
    default_loss(transformed(x)).backward()
    sums = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert relative_error(sums, weighted(weights(norms, c), expected)) <= 1e-10
    report = fxgrad.result(transformed, clipped)
    assert relative_error({"": report.norm_sample}, {"": norms}) <= 1e-10
    if samples in quantities:
        found = {n: p.grad_sample for n, p in model.named_parameters()}  # type: ignore[attr-defined]
        assert relative_error(found, expected) <= 1e-10
        assert all(len(p.norm_sample) == 6 for p in model.parameters())  # type: ignore[attr-defined]
    fxgrad.zero_grad(transformed)
    with pytest.raises(fxgrad.errors.BatchSizeError, match="5 rows cannot be groups of 3"):
        transformed(x[:5])


class ReadInTwoWays(nn.Module):
    """A matrix whose rows are read, and single elements of it: two tables of one parameter, of other lines."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.w).sum(1) + self.w[ids[:, 0], ids[:, 1] % 4][:, None]


class RowsFirst(ReadInTwoWays):
    """The same sum the other way round: its backward meets the rows first. The elements are those of the first row."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.w[ids[:, 0] // 6, ids[:, 1] % 4][:, None] + F.embedding(ids, self.w).sum(1)


@pytest.mark.parametrize("model", [ReadInTwoWays, RowsFirst])
def test_gradients_of_rows_and_single_elements_of_one_matrix(model: type[ReadInTwoWays]) -> None:
    torch.manual_seed(0)
    net, ids = model(), torch.randint(6, (5, 4))
    expected = per_sample_grads(net, default_loss, (ids,))
    default_loss(fxgrad.transform(net, backend="eager")(ids)).backward()
    assert relative_error({"w": net.w.grad_sample}, expected) <= 1e-10  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", [None, {"*": "rows"}, "materialise"], ids=str)
def test_rows_and_single_elements_of_one_matrix(strategy: Any) -> None:
    torch.manual_seed(0)
    model, ids = ReadInTwoWays(), torch.randint(6, (5, 4))
    expected = per_sample_grads(model, default_loss, (ids,))["w"].flatten(1)
    quantities = [fxgrad.NormSample(), fxgrad.GradGram(), fxgrad.SquaredGrad()]
    transformed = fxgrad.transform(model, quantity=quantities, strategy=strategy, backend="eager")
    default_loss(transformed(ids)).backward()
    found = {
        "norms": fxgrad.result(transformed, quantities[0]),
        "gram": fxgrad.result(transformed, quantities[1]),
        "squares": model.w.squared_grad_sum.flatten(),  # type: ignore[attr-defined]
    }
    truth = {"norms": expected.norm(dim=1), "gram": expected @ expected.t(), "squares": expected.square().sum(0)}
    assert relative_error(found, truth) <= 1e-10
