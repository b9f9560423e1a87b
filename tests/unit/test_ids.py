"""Sample ids: a tensor of them is written for a layout, and a layout is read off one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxgrad.samples.ids import read_copies, read_layout, read_partly, read_written, sample_ids
from fxgrad.samples.layouts import Layout

FORMS: list[tuple[Layout, tuple[int, ...], list[int]]] = [  # of two samples, along the dim that holds them
    (Layout(0), (2, 3), [1, 2]),
    (Layout(1), (3, 2), [1, 2]),
    (Layout(0, 1, 3), (6, 4), [1, 1, 1, 2, 2, 2]),
    (Layout(0, 3, 1), (6, 4), [1, 2, 1, 2, 1, 2]),
    (Layout(1, 2, 2), (5, 8), [1, 1, 2, 2, 1, 1, 2, 2]),
]


@pytest.mark.parametrize("layout, shape, expected", FORMS)
def test_ids_of_a_layout(layout: Layout, shape: tuple[int, ...], expected: list[int]) -> None:
    ids = sample_ids(layout, shape, 2)
    assert ids.shape == shape
    assert ids.movedim(layout.dim, 0).flatten(1)[:, 0].tolist() == expected
    assert [dim for dim, stride in enumerate(ids.stride()) if stride] == [layout.dim]


@pytest.mark.parametrize("layout, shape, expected", FORMS)
def test_the_layout_is_read_back(layout: Layout, shape: tuple[int, ...], expected: list[int]) -> None:
    assert read_layout(sample_ids(layout, shape, 2), 2) == (layout.dim, layout.outer, layout.inner)


def test_what_is_left_of_a_dimension() -> None:
    assert sample_ids(Layout(0, 1, None), (6,), 2).tolist() == [1, 1, 1, 2, 2, 2]
    assert sample_ids(Layout(0, None, 1), (6,), 2).tolist() == [1, 2, 1, 2, 1, 2]


def test_rows_of_packed_data_have_an_id_each() -> None:
    assert sample_ids(Layout(0, rows=("batch_sizes", "order")), (4,), 2).tolist() == [1, 2, 3, 4]


X = sample_ids(Layout(0), (3, 4), 3)  # [3, 4]
NOTHING = torch.zeros((3, 1), dtype=torch.int32)


@pytest.mark.parametrize(
    "ids, found",
    [
        (X, (0, 1, 1)),
        (X.t(), (1, 1, 1)),
        (X.t().reshape(-1), (0, 4, 1)),
        (X.reshape(-1), (0, 1, 4)),
        (torch.cat([X, NOTHING], 1), (0, 1, 1)),  # a constant beside them
        (X.flip(0), None),  # another order
        (X.roll(1, 0), None),
        (X[:2], None),  # one is missing
        (torch.cat([X, X[:1]]), None),
        (torch.cat([X, NOTHING.expand(3, 4)]), None),  # rows of no sample
        (torch.cat([X[:, :2], X.roll(1, 0)[:, :2]], 1), None),  # two samples in a row
        (X[None] * X[:, None], None),
        (X[:0], None),
    ],
)
def test_layouts_read(ids: Tensor, found: tuple[int, int, int] | None) -> None:
    assert read_layout(ids, 3) == found


def test_what_was_written_has_to_lie_alike_in_every_sample() -> None:
    alike, diagonal = X.clone(), X.clone()
    alike[:, 1] = 0
    diagonal.fill_diagonal_(0)
    assert read_layout(alike, 3) == read_layout(diagonal, 3) == read_written(alike, 3) == (0, 1, 1)
    assert read_written(diagonal, 3) is None


@pytest.mark.parametrize(
    "row, found",
    [
        ([1, 2, 3], None),  # no row of no sample: `read_layout` is for these
        ([1, 0, 2, 0, 3, 0], (0, 1, 2)),
        ([0, 1, 0, 2, 0, 3], (0, 1, 2)),
        ([1, 2, 3, 0, 0, 0], (0, 2, 1)),
        ([0, 2, 3, 1, 0, 0], (0, 2, 1)),
        ([1, 0, 3, 0, 2, 0], (0, 2, 1)),
        ([2, 0, 1, 0, 3, 0], None),  # in no order that a split has
        ([1, 2, 0], None),  # a sample is missing
        ([1, 2, 3, 0], None),  # no multiple of the batch
    ],
)
def test_rows_of_no_sample_count_as_any_samples(row: list[int], found: tuple[int, int, int] | None) -> None:
    assert read_partly(torch.tensor(row)[:, None].expand(-1, 2), 3) == found


W = torch.arange(1, 5)  # the elements of a parameter [4]


@pytest.mark.parametrize(
    "copy, found",
    [
        (lambda w: w.expand(3, -1), (0, 1, 1)),
        (lambda w: w.repeat(3), (0, 1, 4)),
        (lambda w: w.repeat_interleave(3), (0, 4, 1)),
        (lambda w: torch.cat([w, w, w.flip(0)]), None),
        (lambda w: w, None),
    ],
)
def test_copies_of_a_parameter(copy: Callable[[Tensor], Tensor], found: tuple[int, int, int] | None) -> None:
    assert read_copies(copy(W), 0, 3) == found
