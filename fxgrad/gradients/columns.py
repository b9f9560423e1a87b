"""What needs every element of every sample's gradient, but not all of them at once.

    squares      Σ_n D_n²                     gram         <D_n, D_m> = Σ_blocks rows rowsᵀ
    variance     Σ_n (D_n - mean)² / (n - 1)  projection   Σ_blocks rows signs

Each is made of a block of columns of the matrix [samples, elements] at a time: some lines of the parameter (along its
first dimension) of all samples, multiplied out from the factors and then forgotten. Of tables alone, only lines that
some sample has read. Gram matrices of few positions are made of the positions' own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import reduce

import torch
from torch import Tensor

from fxgrad.kernels.norms import as_vectors, is_readable
from fxgrad.kernels.signs import times_signs
from fxgrad.kernels.sizes import hint
from fxgrad.kernels.sums import SMALL
from fxgrad.terms import Materialised, Part, part_of
from fxgrad.terms.part import Chosen, Packed, Readable

ELEMENTS = 1 << 20  # elements of gradients that are multiplied out together


@dataclass(frozen=True)
class Statistic:
    """What is computed from the rows ``[n, elements]``; an operator takes its name, and its fields as settings."""

    def of_factors(self, part: Part, dtype: torch.dtype) -> Tensor | None:
        """Return the result where the factors of a single part give it at once."""
        return None

    def shape(self, n: int, elements: int) -> tuple[int, ...]:
        return (elements,)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return the result from whole rows, or from some columns of them."""
        raise NotImplementedError

    def add(self, total: Tensor, rows: Tensor, lines: tuple[int, int], chosen: Chosen) -> None:
        """Add to the result what some lines say; ``lines``: how many there are, and the elements of one."""
        result = self.of_rows(rows).view(-1, lines[1])
        if isinstance(chosen, Tensor):
            total.view(lines).index_add_(0, chosen, result.to(total.dtype))
        else:
            total.view(lines)[chosen] = result


class Squares(Statistic):
    def of_factors(self, part: Part, dtype: torch.dtype) -> Tensor | None:
        return part.squares()

    def of_rows(self, rows: Tensor) -> Tensor:
        return rows.square().sum(0)


class Variance(Statistic):
    """Unbiased; NaN of one sample."""

    def of_rows(self, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(0)
        return centred.square().sum(0) / torch.full((), rows.shape[0] - 1, dtype=rows.dtype, device=rows.device)


class Gram(Statistic):
    def of_factors(self, part: Part, dtype: torch.dtype) -> Tensor | None:
        return part.gram(dtype)

    def shape(self, n: int, elements: int) -> tuple[int, ...]:
        return n, n

    def of_rows(self, rows: Tensor) -> Tensor:
        return rows @ rows.t()

    def add(self, total: Tensor, rows: Tensor, lines: tuple[int, int], chosen: Chosen) -> None:
        total += self.of_rows(rows)


@dataclass(frozen=True)
class Projection(Statistic):
    """The product with a matrix of signs that (seed, key) names."""

    dim: int
    seed: int
    key: int

    def shape(self, n: int, elements: int) -> tuple[int, ...]:
        return n, self.dim

    def add(self, total: Tensor, rows: Tensor, lines: tuple[int, int], chosen: Chosen) -> None:
        count, width = (torch.arange(size, device=rows.device) for size in lines)
        columns = (count[chosen].unsqueeze(1) * lines[1] + width).flatten()
        total += times_signs(rows, columns, self.dim, self.seed, self.key)


STATISTICS: dict[str, type[Statistic]] = {kind.__name__: kind for kind in (Squares, Variance, Gram, Projection)}


def by_columns(parts: Sequence[Part | Tensor], statistic: Statistic, dtype: torch.dtype) -> Tensor:
    """Return a statistic of the sum of some parts."""
    whole = [part_of(part) for part in parts]
    from_factors = statistic.of_factors(whole[0], dtype) if len(whole) == 1 else None
    if from_factors is not None:
        return from_factors
    readable, lines = by_lines(whole)
    (first, *_) = readable
    if isinstance(first, Materialised) and len(readable) == 1:
        elements = math.prod(hint(size) for size in first.own_shape())
        if elements <= SMALL and not isinstance(statistic, Projection):
            return statistic.of_rows(first.rows.to(dtype))
    packed = Packed.of(readable, dtype)
    name, settings = type(statistic).__name__, astuple(statistic)
    result: Tensor = columns(packed.tensors, packed.numbers, packed.layout, lines, name, list(settings))
    return result


def by_lines(parts: Sequence[Part]) -> tuple[list[Readable], list[int]]:
    """Return a sum of parts as parts of lines of one width, how many lines there are, and their width."""
    readable = [part.by_lines() for part in parts]
    widths = {part.width for part in readable if part.width is not None}
    if len(widths) != 1:  # none, or lines of several widths
        readable, widths = [multiplied_out(readable)], {1}
    (width,) = widths
    return readable, [math.prod(readable[0].own_shape()) // max(width, 1), width]


def multiplied_out(parts: Sequence[Part]) -> Materialised:
    """Return a sum of parts as vectors, lines of one element."""
    return Materialised(reduce(torch.add, [as_vectors(part.dense()) for part in parts]))


@torch.library.custom_op("fxgrad::columns", mutates_args=())
def columns(
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    layout: str,
    lines: Sequence[int],
    name: str,
    settings: Sequence[int],
) -> Tensor:
    """See the head of this file; ``lines``: how many there are, and their elements; ``layout``: see `Packed`."""
    statistic = STATISTICS[name](*settings)
    n, (count, width) = tensors[0].shape[0], lines
    total = _empty(statistic, tensors, lines).zero_()
    if isinstance(statistic, Variance) and n == 1:
        return total.fill_(math.nan)
    parts = Packed(layout, list(tensors), list(numbers)).parts()
    touched = _touched(parts, count)
    step = max(1, ELEMENTS // max(n * width, 1))
    for start in range(0, count if touched is None else len(touched), step):
        chosen = slice(start, min(start + step, count)) if touched is None else touched[start : start + step]
        rows = reduce(torch.add, [part.read(chosen, width) for part in parts])
        if isinstance(chosen, Tensor):  # what is no line has rows of zeros: they are added to the last one
            chosen = chosen.clamp(max=count - 1)
        statistic.add(total, rows, (count, width), chosen)
    return total


def _touched(parts: Sequence[Readable], count: int) -> Tensor | None:
    """Return the lines that some sample's gradient has, in order; None where each may have all."""
    lines = [ids.flatten() for ids in (part.touched() for part in parts) if ids is not None]
    if len(lines) != len(parts):
        return None
    ids = torch.cat(lines)
    return ids.unique() if is_readable(ids) else distinct(ids, count)


def distinct(ids: Tensor, count: int) -> Tensor:
    """Return the ids in order, and ``count``, which is no line, for each that occurs again: no device is waited for."""
    found = ids.sort().values
    again = torch.nn.functional.pad(found[1:] == found[:-1], (min(len(found), 1), 0))
    return found.masked_fill(again, count).sort().values


@columns.register_fake
def _(
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    layout: str,
    lines: Sequence[int],
    name: str,
    settings: Sequence[int],
) -> Tensor:
    return _empty(STATISTICS[name](*settings), tensors, lines)


def _empty(statistic: Statistic, tensors: Sequence[Tensor], lines: Sequence[int]) -> Tensor:
    like = next(tensor for tensor in tensors if tensor.is_floating_point())
    return like.new_empty(statistic.shape(like.shape[0], math.prod(lines)))
