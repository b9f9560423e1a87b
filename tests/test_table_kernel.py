"""The kernel in C++ for the norms of a table's per-sample gradients, against gradients in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxgrad.operators import tables
from fxgrad.operators.tables import row_norms


def norms(ids: Tensor, g: Tensor, classes: int, padding: int) -> Tensor:
    """Every sample's gradient, multiplied out in float64."""
    found = []
    for own, rows in zip(ids, g.double(), strict=True):
        table = rows.new_zeros(classes, rows.shape[1]).index_add_(0, own[own != padding], rows[own != padding])
        found.append(table.norm())
    return torch.stack(found)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_shape(data: Any) -> None:
    draw = data.draw
    n, k, d = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 7, 64, 300])), draw(st.sampled_from([1, 3, 16, 37]))
    classes = draw(st.sampled_from([1, 5, 1000]))
    torch.manual_seed(draw(st.integers(0, 99)))
    ids = torch.randint(classes, (n, k), dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    g = torch.randn(n, d, k).mT if draw(st.booleans()) else torch.randn(k, n, d).transpose(0, 1)
    padding = draw(st.sampled_from([-1, 0]))
    norm, bound = row_norms(ids, g, classes, padding)
    true = norms(ids, g, classes, padding)
    torch.testing.assert_close(norm, true, rtol=1e-5, atol=1e-6)
    assert (bound >= true * (1 - 1e-12)).all() and (bound <= true + 1e-3 * g.flatten(1).norm(dim=1)).all()


def test_ids_that_share_their_low_bits() -> None:
    ids = torch.arange(50).repeat(3, 2) << 40
    g = torch.randn(3, 100, 4)
    norm, _ = row_norms(ids, g, 1 << 46, -1)
    torch.testing.assert_close(norm, (g[:, :50] + g[:, 50:]).double().flatten(1).norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-25, 1e18, 1e30])
def test_where_squares_leave_float32(scale: float) -> None:
    ids, g = torch.randint(5, (3, 9)), torch.randn(3, 9, 4)
    g[1] *= scale
    norm, bound = row_norms(ids, g, 5, -1)
    true = norms(ids, g, 5, -1)
    torch.testing.assert_close(norm, true, rtol=1e-5, atol=0)
    assert (bound >= true * (1 - 1e-12)).all() and (bound <= true * 1.001).all()


def test_rows_that_cancel_have_a_bound() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, and 1 in exact arithmetic."""
    g = torch.tensor([[[1e8], [1.0], [-1e8]]])
    norm, bound = row_norms(torch.zeros(1, 3, dtype=torch.long), g, 2, -1)
    assert bound >= 1 >= norm - 1e-6


def test_without_a_compiler_ids_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, g = torch.randint(5, (3, 9)), torch.randn(3, 9, 4)
    assert tables._library() is not None
    found = row_norms(ids, g, 5, 2)
    monkeypatch.setattr(tables, "_library", lambda: None)
    torch.testing.assert_close(found[0], row_norms(ids, g, 5, 2)[0], rtol=1e-5, atol=0)
