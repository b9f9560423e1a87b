"""The kernel in C++ for the norms of a table's per-sample gradients, against gradients in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxgrad
from fxgrad.kernels import tables
from fxgrad.kernels.tables import row_norms, table_grads, table_rows, table_sum
from tests.layouts import expanded


def grads(ids: Tensor, g: Tensor, classes: int, padding: int) -> Tensor:
    """Every sample's gradient, in float64."""
    found = g.new_zeros(len(g), classes, g.shape[2], dtype=torch.float64)
    for table, own, rows in zip(found, ids, g.double(), strict=True):
        table.index_add_(0, own[own != padding], rows[own != padding])
    return found


def norms(ids: Tensor, g: Tensor, classes: int, padding: int) -> Tensor:
    return grads(ids, g, classes, padding).flatten(1).norm(dim=1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_shape(data: Any) -> None:
    draw = data.draw
    n, k, d = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 7, 64, 300])), draw(st.sampled_from([1, 3, 16, 37]))
    classes = draw(st.sampled_from([1, 5, 1000]))
    torch.manual_seed(draw(st.integers(0, 99)))
    ids = torch.randint(classes, (n, k), dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    g = torch.randn(n, d, k).mT if draw(st.booleans()) else torch.randn(k, n, d).transpose(0, 1)
    g = expanded(g, *draw(st.sets(st.integers(0, 2), max_size=2)))
    padding = draw(st.sampled_from([-1, 0]))
    norm, bound = row_norms(ids, g, classes, padding)
    true = norms(ids, g, classes, padding)
    torch.testing.assert_close(norm, true, rtol=1e-5, atol=1e-6)
    found = table_grads(ids, g, classes, padding)
    torch.testing.assert_close(found.double(), grads(ids, g, classes, padding), rtol=1e-5, atol=1e-5)
    rows, both = table_rows(ids, g, classes, padding)
    assert rows.equal(found)
    torch.testing.assert_close(both, torch.stack([norm, bound]), rtol=1e-4, atol=1e-6)
    assert (both[1] >= true * (1 - 1e-12)).all()
    assert (bound >= true * (1 - 1e-12)).all() and (bound <= true + 1e-3 * g.flatten(1).norm(dim=1)).all()
    c = torch.rand(n, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    g = g.clone()
    c[0], g[0] = 0, float("nan")
    summed = (grads(ids[1:], g[1:], classes, padding) * c[1:].view(-1, 1, 1)).sum(0)
    torch.testing.assert_close(table_sum(ids, g, c, classes, padding).double(), summed, rtol=1e-5, atol=1e-5)


def test_ids_that_share_their_low_bits() -> None:
    ids = torch.arange(50).repeat(3, 2) << 40
    g = torch.randn(3, 100, 4)
    norm, _ = row_norms(ids, g, 1 << 46, -1)
    torch.testing.assert_close(norm, (g[:, :50] + g[:, 50:]).double().flatten(1).norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-25, 1e18, 1e30])
def test_where_squares_leave_float32(scale: float) -> None:
    ids, g = torch.randint(5, (3, 9)), torch.randn(3, 9, 4)
    g[1] *= scale
    true = norms(ids, g, 5, -1)
    for norm, bound in (row_norms(ids, g, 5, -1), table_rows(ids, g, 5, -1)[1]):
        torch.testing.assert_close(norm, true, rtol=1e-5, atol=0)
        assert (bound >= true * (1 - 1e-12)).all() and (bound <= true * 1.001).all()


def test_rows_that_cancel_have_a_bound() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, and 1 in exact arithmetic."""
    g = torch.tensor([[[1e8], [1.0], [-1e8]]])
    ids = torch.zeros(1, 3, dtype=torch.long)
    for norm, bound in (row_norms(ids, g, 2, -1), table_rows(ids, g, 2, -1)[1]):
        assert bound >= 1 >= norm - 1e-6


def test_without_a_compiler_ids_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, g = torch.randint(5, (3, 9)), torch.randn(3, 9, 4)
    assert tables.KERNELS.functions is not None
    found, multiplied_out, c = row_norms(ids, g, 5, 2), table_grads(ids, g, 5, 2), torch.tensor([1.0, 0.5, 0.0])
    summed, (rows, both) = table_sum(ids, g, c, 5, 2), table_rows(ids, g, 5, 2)
    monkeypatch.setattr(tables.KERNELS, "functions", None)
    torch.testing.assert_close(found[0], row_norms(ids, g, 5, 2)[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(multiplied_out, table_grads(ids, g, 5, 2))
    torch.testing.assert_close(summed, table_sum(ids, g, c, 5, 2))
    torch.testing.assert_close(rows, table_rows(ids, g, 5, 2)[0])
    torch.testing.assert_close(both, table_rows(ids, g, 5, 2)[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("wrong", [-2, 5])
def test_ids_outside_of_the_table_are_an_error(wrong: int) -> None:
    ids, g = torch.tensor([[0, wrong]]), torch.randn(1, 2, 4)
    with pytest.raises(RuntimeError, match="out of bounds"):
        table_grads(ids, g, 5, -1)
    with pytest.raises(RuntimeError, match="out of bounds"):
        table_rows(ids, g, 5, -1)
    with pytest.raises(RuntimeError, match="out of bounds"):
        table_sum(ids, g, torch.ones(1), 5, -1)


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_sums_do_not_depend_on_the_threads(threads: int) -> None:
    ids, g, c = torch.randint(50, (9, 40)), torch.randn(9, 40, 5), torch.rand(9)
    before = torch.get_num_threads()
    expected = table_sum(ids, g, c, 50, -1)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(table_sum(ids, g, c, 50, -1), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [4, 1, 0])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_large_tables(batch: int, dtype: torch.dtype, backend: str) -> None:
    classes, ids = 2100, torch.randint(2100, (batch, 3, 5))
    model = nn.Embedding(classes, 16, padding_idx=7, dtype=dtype)
    ids[:, 0, :2] = 7
    inner = torch.randn(16, 2, dtype=dtype)
    transformed = fxgrad.transform(nn.Sequential(model, Times(inner)), backend=backend)
    transformed(ids).square().sum().backward()
    values = F.embedding(ids, model.weight.detach())
    g = (2 * values @ inner @ inner.T).flatten(1, 2)
    expected = grads(ids.flatten(1), g, classes, 7)
    found = vars(model.weight)["grad_sample"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


class Times(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.factor
