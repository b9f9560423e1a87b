"""What needs every element of every sample's gradient, but not all of them at once.

    squares      Σ_n D_n²                     gram         <D_n, D_m> = Σ_blocks rows rowsᵀ
    variance     Σ_n (D_n - mean)² / (n - 1)  projection   Σ_blocks rows signs

Each is made of a block of columns of the matrix [samples, elements] at a time: some lines of the parameter (along its
first dimension) of all samples, multiplied out from the factors and then forgotten. Of tables alone, only lines that
some sample has read. Gram matrices of few positions are made of the positions' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from fxgrad.kernels.norms import as_vectors
from fxgrad.kernels.signs import times_signs
from fxgrad.kernels.sizes import hint
from fxgrad.kernels.sums import SMALL
from fxgrad.terms import Materialised, Part, part_of
from fxgrad.terms.part import Readable

ELEMENTS = 1 << 20  # elements of gradients that are multiplied out together
What = tuple[str, int, int, int]  # what is made: its name, and of a projection dim, seed and key


def by_columns(parts: Sequence[Part | Tensor], what: What, dtype: torch.dtype) -> Tensor:
    """``[elements]``, or ``[n, n]`` or ``[n, dim]``, of the sum of some parts."""
    name, *settings = what
    whole = [part_of(part) for part in parts]
    from_factors = _from_factors(whole, name, dtype)
    if from_factors is not None:
        return from_factors
    readable = [part.by_lines() for part in whole]
    widths = {part.lines[1] for part in readable if not isinstance(part, Materialised)}
    if len(widths) != 1:  # none, or lines of several widths
        rows = reduce(torch.add, [as_vectors(part.dense()) for part in readable])
        if math.prod(hint(size) for size in rows.shape[1:]) <= SMALL and name != "projection":
            return _OF_ROWS[name](rows.to(dtype))
        readable, widths = [Materialised(rows)], {1}
    tensors, forms = _packed(readable, dtype)
    (width,), elements = widths, math.prod(readable[0].lines)
    found: Tensor = columns(tensors, forms, [elements // max(width, 1), width], name, settings)
    return found


def _from_factors(parts: Sequence[Part], name: str, dtype: torch.dtype) -> Tensor | None:
    """The result where one part's factors give it at once."""
    if len(parts) != 1:
        return None
    return parts[0].gram(dtype) if name == "gram" else parts[0].squares() if name == "squares" else None


def _packed(parts: Sequence[Readable], dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
    """Parts as an operator takes them: all their tensors, and for each its class, how many tensors it has, how many
    numbers, and those."""
    tensors, forms = [], []
    for part in parts:
        own, numbers = part.pack()
        tensors += [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in own]
        forms += [Readable.classes.index(type(part)), len(own), len(numbers), *numbers]
    return tensors, forms


def _unpacked(tensors: Sequence[Tensor], forms: Sequence[int]) -> list[Readable]:
    """`_packed`, read again."""
    parts: list[Readable] = []
    while forms:
        (kind, first, count), rest = forms[:3], forms[3:]
        parts.append(Readable.classes[kind].unpack(tensors[:first], rest[:count]))
        tensors, forms = tensors[first:], rest[count:]
    return parts


@torch.library.custom_op("fxgrad::columns", mutates_args=())
def columns(
    tensors: Sequence[Tensor], forms: Sequence[int], lines: Sequence[int], what: str, settings: Sequence[int]
) -> Tensor:
    """See the head of this file; ``lines``: how many there are, and their elements; ``settings``: dim, seed, key."""
    parts = _unpacked(tensors, forms)
    n, device, (count, width) = tensors[0].shape[0], tensors[0].device, lines
    like = next(tensor for tensor in tensors if tensor.is_floating_point())
    out = like.new_zeros(_shape(n, lines, what, settings))
    if what == "variance" and n == 1:
        return out.fill_(math.nan)
    touched = _touched(parts)
    step = max(1, ELEMENTS // max(n * width, 1))
    for start in range(0, count if touched is None else len(touched), step):
        chosen = slice(start, min(start + step, count)) if touched is None else touched[start : start + step]
        rows = reduce(torch.add, [part.read(chosen, width) for part in parts])
        if what in ("squares", "variance"):
            out.view(count, width)[chosen] = _OF_ROWS[what](rows).view(-1, width)
        elif what == "gram":
            out += _OF_ROWS[what](rows)
        else:
            own = torch.arange(count, device=device)[chosen].unsqueeze(1) * width + torch.arange(width, device=device)
            out += times_signs(rows, own.flatten(), *settings)
    return out


def _touched(parts: Sequence[Readable]) -> Tensor | None:
    """The lines that some sample's gradient has, in order; None where each may have all."""
    lines = [ids.flatten() for ids in (part.touched() for part in parts) if ids is not None]
    return torch.cat(lines).unique() if len(lines) == len(parts) else None


@columns.register_fake
def _(
    tensors: Sequence[Tensor], forms: Sequence[int], lines: Sequence[int], what: str, settings: Sequence[int]
) -> Tensor:
    like = next(tensor for tensor in tensors if tensor.is_floating_point())
    return like.new_empty(_shape(like.shape[0], lines, what, settings))


def _shape(n: int, lines: Sequence[int], what: str, settings: Sequence[int]) -> tuple[int, ...]:
    return (n, n) if what == "gram" else (n, settings[0]) if what == "projection" else (math.prod(lines),)


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(0)


def _variance(rows: Tensor) -> Tensor:
    """Unbiased; NaN of one sample."""
    centred = rows - rows.mean(0)
    return centred.square().sum(0) / torch.full((), rows.shape[0] - 1, dtype=rows.dtype, device=rows.device)


def _gram(rows: Tensor) -> Tensor:
    return rows @ rows.t()


_OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {"squares": _squares, "variance": _variance, "gram": _gram}
