"""What needs every element of every sample's gradient, but not all of them at once.

    squares      Σ_n D_n²                     gram         <D_n, D_m> = Σ_blocks rows rowsᵀ
    variance     Σ_n (D_n - mean)² / (n - 1)  projection   Σ_blocks rows signs

Each is made of a block of columns of the matrix [samples, elements] at a time: some lines of the parameter (along its
first dimension) of all samples, multiplied out from the factors and then forgotten. Of tables alone, only lines that
some sample has read. Gram matrices of few positions are made of the positions' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxgrad.gradients.parts import Part, dense_of
from fxgrad.operators.convolutions import Settings, weight_grads
from fxgrad.operators.norms import as_vectors
from fxgrad.operators.signs import times_signs
from fxgrad.operators.sums import SMALL
from fxgrad.operators.tables import without
from fxgrad.samples.symbols import hint
from fxgrad.terms import Term

ELEMENTS = 1 << 20  # elements of gradients that are multiplied out together
Lines = slice | Tensor
Reader = Callable[[Lines], Tensor]  # some lines of a part, [n, lines * width]
What = tuple[str, int, int, int]  # what is made: its name, and of a projection dim, seed and key


def by_columns(parts: Sequence[Part], what: What, dtype: torch.dtype) -> Tensor:
    """``[elements]``, or ``[n, n]`` or ``[n, dim]``, of the sum of some parts."""
    if len(parts) == 1 and isinstance(parts[0], Term) and what[0] == "gram":
        by_positions = _gram_of_positions(parts[0], dtype)
        if by_positions is not None:
            return by_positions
    sources = [_source(part) for part in parts]
    widths = {source.width for source in sources if source.kind != "rows"}
    if len(widths) > 1:  # lines of several widths
        sources, widths = [Source("rows", (dense_of(part),), (), 0) for part in parts], set()
    if not widths:
        rows = as_vectors(sources[0].tensors[0])
        for source in sources[1:]:
            rows = rows + as_vectors(source.tensors[0])
        if math.prod(hint(size) for size in rows.shape[1:]) <= SMALL and what[0] != "projection":
            return _OF_ROWS[what[0]](rows.to(dtype))
        sources, widths = [Source("rows", (rows,), (), 1)], {1}
    tensors = [tensor.to(dtype) if tensor.is_floating_point() else tensor for s in sources for tensor in s.tensors]
    kinds = ",".join(source.kind for source in sources)
    settings = [number for source in sources for number in source.settings]
    name, dim, seed, key = what
    found: Tensor = columns(tensors, kinds, settings, _elements(sources), widths.pop(), name, dim, seed, key)
    return found


@dataclass(frozen=True)
class Source:
    """A part as an operator takes it."""

    kind: str
    tensors: tuple[Tensor, ...]
    settings: tuple[int, ...]
    width: int  # elements of one line


def _source(part: Part) -> Source:
    if isinstance(part, Term) and not any(isinstance(f, Tensor) and f.is_complex() for f in part.factors):
        product, table, windows = part.product(), part.rows(), part.windows()
        if product is not None:
            g, x = product
            return Source("product", (g, x), (), x.shape[2])
        if table is not None:
            rows, g = table
            return Source("table", (rows.ids, g), (rows.classes, rows.padding), g.shape[2])
        if windows is not None and not (windows[1].settings.transposed or windows[1].settings.groups > 1):
            g, patches = windows
            numbers = patches.settings.numbers()
            settings = (len(patches.kernel), *patches.kernel, len(numbers), *numbers)
            return Source("windows", (g, patches.input), settings, math.prod(patches.kernel[1:]))
    return Source("rows", (dense_of(part),), (), 0)


def _elements(sources: Sequence[Source]) -> int:
    """The number of elements of one gradient."""
    source = sources[0]
    if source.kind == "rows":
        return math.prod(source.tensors[0].shape[1:])
    lines = source.settings[0] if source.kind == "table" else source.tensors[0].shape[2]
    return lines * source.width


@torch.library.custom_op("fxgrad::columns", mutates_args=())
def columns(
    tensors: Sequence[Tensor],
    kinds: str,
    settings: Sequence[int],
    elements: int,
    width: int,
    what: str,
    dim: int,
    seed: int,
    key: int,
) -> Tensor:
    """See the head of this file; ``kinds`` name the parts, two tensors for each but for rows."""
    n, device = tensors[0].shape[0], tensors[0].device
    readers = list(_readers(tensors, kinds.split(","), list(settings), width))
    lines = elements // max(width, 1)
    touched = torch.cat([t.flatten() for t in tensors[::2]]).unique() if set(kinds.split(",")) == {"table"} else None
    count = lines if touched is None else len(touched)
    step = max(1, ELEMENTS // max(n * width, 1))
    kind = next(t.dtype for t in tensors if t.is_floating_point())
    out = torch.zeros(_shape(n, elements, what, dim), dtype=kind, device=device)
    if what == "variance" and n == 1:
        return out.fill_(math.nan)
    for start in range(0, count, step):
        chosen = slice(start, min(start + step, count)) if touched is None else touched[start : start + step]
        rows = readers[0](chosen)
        for read in readers[1:]:
            rows = rows + read(chosen)
        if what in ("squares", "variance"):
            out.view(lines, width)[chosen] = _OF_ROWS[what](rows).view(-1, width)
        elif what == "gram":
            out += _OF_ROWS[what](rows)
        else:
            own = torch.arange(lines, device=device)[chosen].unsqueeze(1) * width + torch.arange(width, device=device)
            out += times_signs(rows, own.flatten(), dim, seed, key)
    return out


@columns.register_fake
def _(
    tensors: Sequence[Tensor],
    kinds: str,
    settings: Sequence[int],
    elements: int,
    width: int,
    what: str,
    dim: int,
    seed: int,
    key: int,
) -> Tensor:
    kind = next(t for t in tensors if t.is_floating_point())
    return kind.new_empty(_shape(kind.shape[0], elements, what, dim))


def _shape(n: int, elements: int, what: str, dim: int) -> tuple[int, ...]:
    return (n, n) if what == "gram" else (n, dim) if what == "projection" else (elements,)


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(0)


def _variance(rows: Tensor) -> Tensor:
    """Unbiased; NaN of one sample."""
    centred = rows - rows.mean(0)
    return centred.square().sum(0) / torch.full((), rows.shape[0] - 1, dtype=rows.dtype, device=rows.device)


def _gram(rows: Tensor) -> Tensor:
    return rows @ rows.t()


_OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {"squares": _squares, "variance": _variance, "gram": _gram}


def _readers(
    tensors: Sequence[Tensor], kinds: Sequence[str], settings: list[int], width: int
) -> Iterator[Reader]:
    """For each part: some lines -> ``[n, lines * width]``."""
    left = list(tensors)
    for kind in kinds:
        first = left.pop(0)
        if kind == "rows":
            yield _reader_of_rows(first, width)
        elif kind == "product":
            yield _reader_of_product(first, left.pop(0))
        elif kind == "table":
            yield _reader_of_table(first, left.pop(0), settings[1])
            del settings[:2]
        else:
            kernel, numbers = _next_list(settings), _next_list(settings)
            yield _reader_of_windows(first, left.pop(0), kernel, Settings.of(numbers))


def _next_list(settings: list[int]) -> list[int]:
    """Take a list from the front, before which its length stands."""
    end = settings[0] + 1
    found = settings[1:end]
    del settings[:end]
    return found


def _reader_of_rows(rows: Tensor, width: int) -> Reader:
    lines = rows.reshape(rows.shape[0], -1, width)
    return lambda chosen: lines[:, chosen].flatten(1)


def _reader_of_product(g: Tensor, x: Tensor) -> Reader:
    return lambda chosen: (g[:, :, chosen].mT @ x).flatten(1)


def _reader_of_table(ids: Tensor, g: Tensor, padding: int) -> Reader:
    def read(chosen: Lines) -> Tensor:
        whole = chosen if isinstance(chosen, Tensor) else torch.arange(chosen.start, chosen.stop, device=ids.device)
        place = torch.searchsorted(whole, ids).clamp(max=len(whole) - 1)
        inside = (whole[place] == ids) & (ids != padding)
        place = torch.where(inside, place, len(whole)).unsqueeze(2).expand_as(g)  # the last line is for the others
        return g.new_zeros(len(g), len(whole) + 1, g.shape[2]).scatter_add_(1, place, g)[:, :-1].flatten(1)

    return read


def _reader_of_windows(g: Tensor, input: Tensor, kernel: Sequence[int], settings: Settings) -> Reader:
    def read(chosen: Lines) -> Tensor:
        own = g[:, :, chosen]
        out = g.new_empty(len(g), own.shape[2], *kernel[1:])
        weight_grads(own, input, out.shape[1:], settings, out)
        return out.flatten(1)

    return read


def _gram_of_positions(term: Term, dtype: torch.dtype) -> Tensor | None:
    """``<D_n, D_m> = Σ_kl (g_nk·g_ml)(x_nk·x_ml)``, where that takes fewer flops; of a table x is one-hot."""
    product, table = term.product(), term.rows()
    if product is not None and not product[0].is_complex():
        g, x = product
        n, k, o, i = hint(g.shape[0]), hint(g.shape[1]), hint(g.shape[2]), hint(x.shape[2])
        if n * k * k * (o + i) < (n + k) * o * i:
            found: Tensor = product_gram(g.to(dtype), x.to(dtype))
            return found
    if table is not None and hint(table[1].shape[1]) ** 2 < table[0].classes:
        rows, g = table
        found = table_gram(rows.ids, g.to(dtype), rows.padding)
        return found
    return None


def _by_samples(n: int, k: int, of: Callable[[slice], Tensor], like: Tensor) -> Tensor:
    """Some samples with all others at a time: ``of`` gives the products of all their positions, ``[b k, n k]``."""
    step = max(1, ELEMENTS // max(n * k * k, 1))
    out = like.new_empty(n, n)
    for start in range(0, n, step):
        block = slice(start, min(start + step, n))
        out[block] = of(block).view(-1, k, n, k).sum((1, 3))
    return out


@torch.library.custom_op("fxgrad::product_gram", mutates_args=())
def product_gram(g: Tensor, x: Tensor) -> Tensor:
    """Of ``Σ_k g[n, k, o] x[n, k, i]``."""
    by_g, by_x = g.flatten(0, 1).t(), x.flatten(0, 1).t()

    def of(block: slice) -> Tensor:
        return (g[block].flatten(0, 1) @ by_g).mul_(x[block].flatten(0, 1) @ by_x)

    return _by_samples(g.shape[0], g.shape[1], of, g)


@product_gram.register_fake
def _(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[0])


@torch.library.custom_op("fxgrad::table_gram", mutates_args=())
def table_gram(ids: Tensor, g: Tensor, padding_idx: int) -> Tensor:
    """Of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``."""
    g = without(padding_idx, ids, g)
    flat, every = g.flatten(0, 1).t(), ids.flatten()

    def of(block: slice) -> Tensor:
        return (g[block].flatten(0, 1) @ flat).mul_(ids[block].reshape(-1, 1) == every)

    return _by_samples(g.shape[0], g.shape[1], of, g)


@table_gram.register_fake
def _(ids: Tensor, g: Tensor, padding_idx: int) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[0])
