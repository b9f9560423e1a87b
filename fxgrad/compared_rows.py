"""The results of samples that were not changed, from two steps: which of them moved beyond rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxgrad.oracle import wide
from fxgrad.precision import accumulating

SKETCH = 8  # numbers that a row is compared by, where it is longer: random combinations of its elements
BLOCK = 2**16  # elements of a row at a time
FLOOR = 1e-2  # a parameter with smaller results than this share of the largest is measured against that share


@dataclass
class Rows:
    """One delivery's results for the samples that were not changed."""

    label: str
    kept: list[int]  # the sample of each row
    scale: str | None  # the results it is measured with; None for its own alone
    values: Tensor


def sketch(rows: Tensor) -> Tensor:
    """Long rows as a few random combinations: the first step's results need not be kept for the second."""
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
    """The result that moved most, where one moved beyond rounding."""
    by_scale: dict[str | None, float] = {}
    for rows in before:
        by_scale[rows.scale] = max(by_scale.get(rows.scale, 0.0), largest(rows.values))
    worst, said = 0.0, None
    for one, other in zip(before, after, strict=True):
        floor = FLOOR * by_scale[one.scale] if one.scale is not None else 0.0
        a, b = wide(one.values), wide(other.values)
        scale = max(largest(one.values), floor)
        off = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()).nan_to_num(torch.inf)
        by_row = off.flatten(1).amax(1)
        share = float(by_row.max()) / scale if scale else float(by_row.max() > 0)
        if share > max(tolerance, worst):
            worst = share
            said = f"{one.label} moved for sample {one.kept[int(by_row.argmax())]} by {share:.2g} of the largest"
    return said


def largest(values: Tensor) -> float:
    """The largest finite magnitude, 0 where there is none."""
    values = values.detach().abs()
    return float(torch.where(values.isfinite(), values, 0).max()) if values.numel() else 0.0
