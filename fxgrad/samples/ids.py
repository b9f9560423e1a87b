"""Sample ids: small integers that name samples; layouts are written as ids and read from ids.

The ids are 1..batch; 0 stands for an element of no sample (a constant, padding).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.samples.layouts import Layout


def sample_ids(layout: Layout, shape: Sequence[int], batch: int) -> Tensor:
    """Return sample ids 1..batch for a layout; dims without samples have stride 0."""
    size = shape[layout.dim]
    if layout.rows is not None:
        layout, batch = Layout(layout.dim), size
    outer, inner = layout.split(size, batch)
    ids = torch.arange(1, batch + 1, dtype=torch.int32).view(1, batch, 1).expand(outer, batch, inner)
    flat = ids.reshape([-1 if dim == layout.dim else 1 for dim in range(len(shape))])
    return flat.expand(tuple(shape))


def read_layout(ids: Tensor, batch: int) -> tuple[int, int, int] | None:
    """Return (dim, outer, inner) of a tensor of sample ids; None if no single dim separates the samples."""
    if ids.numel() == 0:
        return None
    kept = [dim for dim in range(ids.dim()) if ids.stride(dim) != 0 and ids.shape[dim] > 1]
    small = ids[tuple(slice(None) if dim in kept else 0 for dim in range(ids.dim()))]
    separating = None
    for position, dim in enumerate(kept):
        rows = small.movedim(position, 0).reshape(ids.shape[dim], -1)
        low = torch.where(rows == 0, batch + 1, rows).amin(1)
        if (low == batch + 1).any() or not bool((low == rows.amax(1)).all()):
            continue
        if separating is not None:
            return None
        separating = (dim, low.tolist())
    if separating is None:
        return None
    dim, row = separating
    inner = next((i for i, sample in enumerate(row) if sample != row[0]), len(row))
    outer, rest = divmod(len(row), inner * batch)
    expected = [n for _ in range(outer) for n in range(1, batch + 1) for _ in range(inner)]
    return (dim, outer, inner) if not rest and row == expected else None


def read_written(ids: Tensor, batch: int) -> tuple[int, int, int] | None:
    """Return `read_layout` of ids after a write of zeros; None if the write covers different elements of each sample.

    ``diagonal_scatter(x, w, 1)`` writes each element of w into one sample only.
    """
    layout = read_layout(ids, batch)
    if layout is None:
        return None
    dim, outer, inner = layout
    written = ids.movedim(dim, 0).unflatten(0, (outer, batch, inner)) == 0
    return layout if bool((written == written[:, :1]).all()) else None


def read_partly(ids: Tensor, batch: int) -> tuple[int, int, int] | None:
    """Return the only (dim, outer, inner) that fits ids in which some rows along the dim have id 0.

    Such rows are constants and may count as rows of any sample.
    """
    fits = []
    for dim in range(ids.dim()):
        size = ids.shape[dim]
        rows = ids.movedim(dim, 0).reshape(size, -1)
        row = rows.amax(1)
        alone = bool(((rows == row[:, None]) | (rows == 0)).all())
        if not alone or len(row.unique()) != batch + 1:
            continue
        for outer, inner in _splits(size, batch):
            whole = sample_ids(Layout(0, outer, inner), [size], batch)
            if bool(((row == whole) | (row == 0)).all()):
                fits.append((dim, outer, inner))
    return fits[0] if len(fits) == 1 else None


def read_copies(elements: Tensor, dim: int, batch: int) -> tuple[int, int, int] | None:
    """Return (dim, outer, inner) of a shared value's copies per sample, from ids of its elements.

    ``W.repeat(B, 1)`` and ``W.expand(B, -1)`` put equal copies along ``dim``. The result is the one split in which no
    element depends on the sample.
    """
    rows = elements.movedim(dim, 0)
    fits = []
    for outer, inner in _splits(len(rows), batch):
        split = rows.reshape(outer, batch, inner, *rows.shape[1:])
        if bool((split == split[:, :1]).all()):
            fits.append((dim, outer, inner))
    return fits[0] if len(fits) == 1 else None


def _splits(size: int, batch: int) -> list[tuple[int, int]]:
    """Return each ``(outer, inner)`` with ``outer * batch * inner == size``."""
    total, rest = divmod(size, batch)
    return [] if rest else [(total // i, i) for i in range(1, total + 1) if total % i == 0]
