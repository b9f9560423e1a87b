"""Squares, variances, Gram matrices and projections: against the gradients, and never all of those at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
import fxgrad.gradients.columns
import fxgrad.gradients.others
import fxgrad.kernels.sample_grams
from fxgrad.gradients.columns import Gram, Projection, Squares, Statistic, Variance, by_columns, by_lines
from fxgrad.gradients.others import inner_products
from fxgrad.gradients.parts import summed
from fxgrad.kernels.sample_grams import product_gram, table_gram
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.signs import signs
from fxgrad.terms import Materialised, OneHot, Part, Patches, Term, part_of
from fxgrad.terms.part import Packed
from fxgrad.terms.product import Product
from fxgrad.testing import default_loss, relative_error
from tests.allocations import peak
from tests.programs import quick_dynamo
from tests.test_virtual import backward_of, elements

N = 5


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


def randn(*shape: int) -> Tensor:
    return torch.randn(N, *shape, dtype=torch.float64)


def product(k: int, shape: tuple[int, ...] | None = None) -> Term:
    return Term("n...o,n...i->noi", randn(k, 7), randn(k, 6), shape=shape)


def table(k: int, padding: int | None = None) -> Term:
    return Term("n...v,n...d->nvd", OneHot(torch.randint(7, (N, k)), 7, padding), randn(k, 6))


def windows(kernel: tuple[int, ...], groups: int = 1, transposed: bool = False) -> Term:
    g, x = randn(1, 4, 6, 7), randn(1, 4, 6, 7)
    sides = tuple(size // 2 for size in kernel[2:])
    patches = Patches(x, kernel, Settings((1, 1), sides, (1, 1), transposed, (0, 0), groups))
    return Term("nko...,nk...i->noi", g, patches)


PARTS: dict[str, Callable[[], list[Part | Tensor]]] = {
    "one position": lambda: [product(1)],
    "three positions": lambda: [product(3)],
    "in another shape": lambda: [product(3, (21, 2))],
    "table": lambda: [table(3)],
    "table with padding": lambda: [table(4, padding=2)],
    "tied": lambda: [product(3), table(3), Materialised(randn(7, 6), torch.zeros(N))],
    "windows": lambda: [windows((4, 4, 3, 5))],
    "windows in groups": lambda: [windows((4, 2, 3, 3), groups=2)],
    "transposed windows": lambda: [windows((4, 4, 3, 3), transposed=True)],
    "lines of two widths": lambda: [product(2, (42,)), Term("n...ab->nab", randn(3, 21, 2))],
    "rows": lambda: [randn(4500)],
    "small rows": lambda: [randn(3)],
}


def expected(rows: Tensor, statistic: Statistic) -> Tensor:
    if isinstance(statistic, Gram):
        return rows @ rows.t()
    if isinstance(statistic, Projection):
        return rows @ signs(torch.arange(rows.shape[1]), 11, 3, 8).double()
    return rows.square().sum(0) if isinstance(statistic, Squares) else rows.var(0)


@pytest.mark.parametrize("block", [64, 1 << 20])
@pytest.mark.parametrize("name", PARTS)
def test_against_rows(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxgrad.gradients.columns, "ELEMENTS", block)
    monkeypatch.setattr(fxgrad.kernels.sample_grams, "ELEMENTS", block)
    torch.manual_seed(0)
    parts = PARTS[name]()
    flat = [part.dense() if isinstance(part, Term) else summed([part]) for part in parts]
    rows = torch.stack([one.flatten(1) for one in flat]).sum(0)
    for statistic in (Squares(), Variance(), Gram(), Projection(11, 3, 8)):
        found = by_columns(parts, statistic, torch.float64)
        assert relative_error({"": found}, {"": expected(rows, statistic)}) <= 1e-10, statistic


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_gram_matrices_of_positions(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxgrad.kernels.sample_grams, "ELEMENTS", block)
    torch.manual_seed(0)
    g, x, ids = randn(3, 7), randn(3, 6), torch.randint(4, (N, 3))
    rows = (g.mT @ x).flatten(1)
    assert relative_error({"": product_gram(g, x)}, {"": rows @ rows.t()}) <= 1e-10
    rows = Term("n...v,n...d->nvd", OneHot(ids, 4, 2), g).dense().flatten(1)
    assert relative_error({"": table_gram(ids, g, 2)}, {"": rows @ rows.t()}) <= 1e-10


SAME = [name for name in PARTS if "windows" not in name and not name.endswith("rows")]
"""Parts of a parameter of 42 elements."""


@pytest.mark.parametrize("block", [32, 1 << 20])
@pytest.mark.parametrize("mine", SAME)
@pytest.mark.parametrize("others", SAME)
def test_products_with_other_samples(mine: str, others: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one parameter, whose gradients two processes may have in two forms."""
    monkeypatch.setattr(fxgrad.gradients.others, "ELEMENTS", block)
    monkeypatch.setattr(fxgrad.kernels.sample_grams, "ELEMENTS", block)
    torch.manual_seed(0)
    assert_products(PARTS[mine](), PARTS[others]())


@pytest.mark.parametrize("name", [name for name in PARTS if name not in SAME])
def test_products_with_other_samples_of_large_parameters(name: str) -> None:
    torch.manual_seed(0)
    assert_products(PARTS[name](), PARTS[name]())
    one = summed(PARTS[name]())
    assert_products([one], PARTS[name]())


def assert_products(mine: list[Part | Tensor], others: list[Part | Tensor]) -> None:
    rows, columns = (torch.stack([part_of(one).dense().flatten(1) for one in parts]).sum(0) for parts in (mine, others))
    (own, lines), (theirs, lines_of_others) = map(packed, (mine, others))
    assert relative_error({"": inner_products(own, lines, theirs, lines_of_others)}, {"": rows @ columns.t()}) <= 1e-10


def packed(parts: list[Part | Tensor]) -> tuple[Packed, list[int]]:
    readable, lines = by_lines([part_of(part) for part in parts])
    return Packed.of(readable, torch.float64), lines


@pytest.mark.parametrize("k", [1, 2, 40])
def test_products_of_other_numbers_of_samples_and_positions(k: int) -> None:
    """Few positions are multiplied with each other, many are multiplied out."""
    g, x, h, y = (torch.randn(size, dtype=torch.float64) for size in ((4, k, 7), (4, k, 6), (9, 2, 7), (9, 2, 6)))
    others = Product.of(h, y)
    assert (Product.of(g, x).with_others(others) is None) == (k == 40)
    found = inner_products(Packed("Product 2 0", [g, x], []), [7, 6], Packed("Product 2 0", [h, y], []), [7, 6])
    rows = (g.mT @ x).flatten(1) @ (h.mT @ y).flatten(1).t()
    assert relative_error({"": found}, {"": rows}) <= 1e-10


def test_one_sample() -> None:
    alone = Term("n...o,n...i->noi", randn(3, 7)[:1], randn(3, 6)[:1])
    found = by_columns([alone], Variance(), torch.float64)
    assert bool(found.isnan().all())


class Net(nn.Module):
    """A table, layers on three positions, a convolution, and a function of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(211, 31)
        self.first, self.second = nn.Linear(31, 67), nn.Linear(67, 71)
        self.conv = nn.Conv1d(71, 73, 3, padding=1)
        self.turned = nn.Parameter(torch.randn(73, 79) / 9)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.second(self.first(self.table(ids)).tanh())
        return F.linear(self.conv(h.mT).mT.contiguous().tanh(), self.turned.t())


QUANTITIES = [fxgrad.SquaredGrad(), fxgrad.GradVariance(), fxgrad.GradGram(), fxgrad.GradProjection(5)]
SIZE = 16
P = 211 * 31 + 31 * 67 + 67 * 71 + 71 * 73 * 3 + 73 * 79


@pytest.mark.parametrize("quantity", [*QUANTITIES, fxgrad.GradSample()], ids=str)
def test_the_gradients_are_never_held(quantity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 x 36,000 elements; GradSample shows that the measure sees them."""
    monkeypatch.setattr("fxgrad.gradients.columns.ELEMENTS", 1 << 13)
    monkeypatch.setattr("fxgrad.kernels.sample_grams.ELEMENTS", 1 << 13)
    monkeypatch.setattr("fxgrad.kernels.signs.BLOCK", 1 << 13)
    torch.manual_seed(0)
    transformed = fxgrad.transform(Net(), quantity=quantity, backend="eager")
    ids = torch.randint(211, (SIZE, 3))
    default_loss(transformed(ids)).backward()  # compiles
    transformed.zero_grad()
    most = peak(default_loss(transformed(ids)).backward)
    whole = SIZE * P * 4
    if isinstance(quantity, fxgrad.GradSample):
        assert most >= whole
    else:
        assert most <= whole / 4, most / whole


@pytest.mark.parametrize("quantity", [QUANTITIES[0], QUANTITIES[2]], ids=str)
def test_no_value_is_a_weight_s_size_times_b(quantity: Any) -> None:
    torch.manual_seed(0)
    gm = backward_of(Net(), torch.randint(211, (SIZE, 3)), quantity)
    assert max(elements(gm)) < SIZE * 31 * 67  # the smallest of the weights
