"""Small integers that name samples: written for a layout, and a layout read off them.

The ids are 1..batch; 0 stands for a value of no sample (a constant, padding).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.samples.layouts import Layout


def sample_ids(layout: Layout, shape: Sequence[int], batch: int) -> Tensor:
    """Sample ids 1..batch of a value with this layout; dims that hold no samples have stride 0."""
    size = shape[layout.dim]
    if layout.rows is not None:
        layout, batch = Layout(layout.dim), size
    inner = layout.inner if layout.inner is not None else size // (batch * (layout.outer or 1))
    outer = layout.outer if layout.outer is not None else size // (batch * inner)
    ids = torch.arange(1, batch + 1, dtype=torch.int32).view(1, batch, 1).expand(outer, batch, inner)
    flat = ids.reshape([-1 if dim == layout.dim else 1 for dim in range(len(shape))])
    return flat.expand(tuple(shape))


def read_layout(ids: Tensor, batch: int) -> tuple[int, int, int] | None:
    """(dim, outer, inner) of a tensor of sample ids, or None where the samples have no dim of their own."""
    if ids.numel() == 0:
        return None
    kept = [dim for dim in range(ids.dim()) if ids.stride(dim) != 0 and ids.shape[dim] > 1]
    small = ids[tuple(slice(None) if dim in kept else 0 for dim in range(ids.dim()))]
    found = None
    for position, dim in enumerate(kept):
        rows = small.movedim(position, 0).reshape(ids.shape[dim], -1)
        low = torch.where(rows == 0, batch + 1, rows).amin(1)
        if (low == batch + 1).any() or not bool((low == rows.amax(1)).all()):
            continue
        if found is not None:
            return None
        found = (dim, low.tolist())
    if found is None:
        return None
    dim, row = found
    inner = next((i for i, sample in enumerate(row) if sample != row[0]), len(row))
    outer, rest = divmod(len(row), inner * batch)
    expected = [n for _ in range(outer) for n in range(1, batch + 1) for _ in range(inner)]
    return (dim, outer, inner) if not rest and row == expected else None


def read_written(ids: Tensor, batch: int) -> tuple[int, int, int] | None:
    """`read_layout` of what an op wrote over, None where what it wrote lies elsewhere in one sample than in another.

    ``diagonal_scatter(x, w, 1)`` writes w into the matrix of all samples, to a place of one sample alone.
    """
    found = read_layout(ids, batch)
    if found is None:
        return None
    dim, outer, inner = found
    written = ids.movedim(dim, 0).unflatten(0, (outer, batch, inner)) == 0
    return found if bool((written == written[:, :1]).all()) else None


def read_partly(ids: Tensor, batch: int) -> tuple[int, int, int] | None:
    """(dim, outer, inner) of sample ids in which some rows along that dim are of no sample: the only split that fits.

    Such rows are constants, and may count as any sample's.
    """
    fits = []
    for dim in range(ids.dim()):
        size = ids.shape[dim]
        rows = ids.movedim(dim, 0).reshape(size, -1)
        row = rows.amax(1)
        alone = bool(((rows == row[:, None]) | (rows == 0)).all())
        if not alone or size % batch or len(row.unique()) != batch + 1:
            continue
        total = size // batch
        for inner in (i for i in range(1, total + 1) if total % i == 0):
            whole = torch.arange(1, batch + 1).view(1, batch, 1).expand(total // inner, batch, inner).reshape(-1)
            if bool(((row == whole) | (row == 0)).all()):
                fits.append((dim, total // inner, inner))
    return fits[0] if len(fits) == 1 else None


def read_copies(elements: Tensor, dim: int, batch: int) -> tuple[int, int, int] | None:
    """(dim, outer, inner) of a shared value's copies for the samples, from ids of its elements.

    ``W.repeat(B, 1)`` and ``W.expand(B, -1)`` put equal copies along ``dim``: the split in which nothing
    depends on the sample.
    """
    size = elements.shape[dim]
    total, rest = divmod(size, batch)
    if rest:
        return None
    rows = elements.movedim(dim, 0)
    fits = []
    for inner in (i for i in range(1, total + 1) if total % i == 0):
        split = rows.reshape(total // inner, batch, inner, *rows.shape[1:])
        if bool((split == split[:, :1]).all()):
            fits.append((dim, total // inner, inner))
    return fits[0] if len(fits) == 1 else None
