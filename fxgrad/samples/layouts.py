"""Where the samples are inside a value.

A tensor that holds the batch has one dimension of size ``outer * B * inner`` with the sample index in
the middle. ``[B, T, C]`` has the layout ``(0, 1, 1)``; ``view(B*T, C)`` makes ``(0, 1, T)``; the same
with time first makes ``(0, T, 1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Kind(Enum):
    """What a value depends on."""

    CONSTANT = "constant"  # no trainable parameter, no sample
    UNIFORM = "uniform"  # trainable parameters only, the same for every sample
    BATCHED = "batched"  # holds the samples, at a known place
    MIXED = "mixed"  # depends on samples, which have no place of their own in it


@dataclass(frozen=True)
class Layout:
    """Dimension ``dim`` has size ``outer * B * inner``, the sample index in the middle.

    One of ``outer`` and ``inner`` may be None: what is left of that dimension's (symbolic) size.
    With ``rows``, the dimension holds the rows of packed data instead (`fxgrad.recurrent.packed`): which sample a row
    belongs to is known at run time, from two values of the graph, named here: batch_sizes and sorted_indices.
    Padded, the data would have ``outer * B * inner`` sequences.
    """

    dim: int
    outer: int | None = 1
    inner: int | None = 1
    rows: tuple[str, str] | None = None

    @property
    def merged(self) -> bool:
        """Whether the dimension holds more than the samples."""
        return (self.outer, self.inner) != (1, 1) or self.rows is not None

    def at(self, dim: int) -> Layout:
        """The same merge at another dimension."""
        return Layout(dim, self.outer, self.inner, self.rows)

    def __str__(self) -> str:
        if self == WHOLE:
            return "(all)"
        if self.rows is not None:
            return f"({self.dim}, packed)"
        sizes = ["?" if size is None else str(size) for size in (self.outer, self.inner)]
        return f"({self.dim}, {sizes[0]}, {sizes[1]})" if self.merged else f"({self.dim})"


WHOLE = Layout(-1, None, None)
"""Of a value in a batch of one: all of it is the sample's, and nothing says which of its dimensions was the batch."""


@dataclass(frozen=True)
class Samples:
    """One value's kind, its layout when it is batched, and whether a gradient flows through it."""

    kind: Kind
    layout: Layout | None = None
    traced: bool = False  # a trainable parameter's gradient flows through it
    met: bool = False  # mixing="allow": the op that made it let samples meet

    def __str__(self) -> str:
        return f"{self.kind.value}{self.layout}" if self.layout is not None else self.kind.value


def samples_first(value: Tensor, layout: Layout, n: int) -> Tensor:
    """``[.., outer*n*inner, ..] -> [n, .., outer*inner, ..]``: one row is what a single sample's call sees.

    >>> samples_first(torch.arange(6), Layout(0, 1, 2), 3).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    if layout is WHOLE:
        return value.unsqueeze(0)
    dim = layout.dim
    if not layout.merged and dim == 0:  # Inductor cancels views: a rule's flatten(0, 1) is the value itself
        return value.view(value.shape[0], 1, *value.shape[1:])
    if not layout.merged:
        return value.movedim(dim, 0).unsqueeze(dim + 1)
    before, after = value.shape[:dim], value.shape[dim + 1 :]
    size = value.shape[dim]
    outer = size // (n * layout.inner) if layout.outer is None else layout.outer  # type: ignore[operator]
    inner = size // (n * outer) if layout.inner is None else layout.inner
    split = value.reshape(*before, outer, n, inner, *after).movedim(dim + 1, 0)
    return split.reshape(n, *before, outer * inner, *after)
