"""The comparison of the unchanged samples' results in two steps, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxgrad.kernels.precision import accumulating, wide

SKETCH = 8  # a longer row is compared by this many random combinations of its elements
BLOCK = 2**16  # elements of a row at a time
FLOOR = 1e-2  # results are measured against at least this share of the largest of their kind


@dataclass
class Rows:
    """The results of one delivery for the unchanged samples."""

    label: str
    kept: list[int]  # the sample of each row
    scale: str | None  # the kind of results whose largest is the scale; None for only these
    values: Tensor


def sketch(rows: Tensor) -> Tensor:
    """Reduce long rows to a few random combinations, so that the first step's results need not stay in memory."""
    if rows.shape[1] <= SKETCH:
        return rows
    random = torch.Generator(rows.device).manual_seed(0)
    dtype = accumulating(rows.dtype)
    total = rows.new_zeros(len(rows), SKETCH, dtype=dtype)
    for block in rows.split(BLOCK, 1):
        signs = torch.randn(block.shape[1], SKETCH, dtype=dtype, device=rows.device, generator=random)
        total += block.to(dtype) @ signs
    return total


def moved(before: Sequence[Rows], after: Sequence[Rows], tolerance: float) -> str | None:
    """Describe the result that changed most; return None if none changed beyond rounding."""
    by_scale: dict[str | None, float] = {}
    for rows in before:
        by_scale[rows.scale] = max(by_scale.get(rows.scale, 0.0), largest(rows.values))
    worst, finding = 0.0, None
    for old, new in zip(before, after, strict=True):
        floor = FLOOR * by_scale[old.scale] if old.scale is not None else 0.0
        scale = max(largest(old.values), floor)
        by_row = difference(old.values, new.values).flatten(1).amax(1)
        share = float(by_row.max()) / scale if scale else float(by_row.max() > 0)
        if share > max(tolerance, worst):
            worst = share
            finding = f"{old.label} moved for sample {old.kept[int(by_row.argmax())]} by {share:.2g} of the largest"
    return finding


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|: 0 where both are equal or NaN, infinite where only one is finite."""
    a, b = wide(a), wide(b)
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)


def largest(values: Tensor) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    values = wide(values).abs()
    return float(torch.where(values.isfinite(), values, 0.0).max()) if values.numel() else 0.0
