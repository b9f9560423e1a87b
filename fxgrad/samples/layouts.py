"""Layouts: the place of the samples in a value.

A batched tensor has one dimension of size ``outer * B * inner`` with the sample index in the middle. ``[B, T, C]`` has
the layout ``(0, 1, 1)``; its ``view(B*T, C)`` has ``(0, 1, T)``; with time first it is ``(0, T, 1)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, fx

from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import Fact


class Kind(Enum):
    """The kinds of values, by what they depend on; a value is of the last kind among what it is made of."""

    CONSTANT = "constant"  # no trainable parameter, no sample
    UNIFORM = "uniform"  # trainable parameters only, the same for every sample
    BATCHED = "batched"  # holds the samples, with a known layout
    MIXED = "mixed"  # depends on samples, without a layout


def last_kind(kinds: Iterable[Kind]) -> Kind:
    """Return the last of some kinds; constant without any."""
    return max(kinds, key=list(Kind).index, default=Kind.CONSTANT)


@dataclass(frozen=True)
class Layout:
    """Dimension ``dim`` has size ``outer * B * inner``, the sample index in the middle.

    One of ``outer`` and ``inner`` may be None: it is the remaining factor of that dimension's (symbolic) size.
    With ``rows``, the dimension holds the rows of packed data instead (`kernels.recurrent.packed`). ``rows`` names two
    values of the graph, batch_sizes and sorted_indices, which give the sample of each row at run time.
    Padded, the data would have ``outer * B * inner`` sequences.
    """

    dim: int
    outer: int | None = 1
    inner: int | None = 1
    rows: tuple[str, str] | None = None

    @property
    def merged(self) -> bool:
        """Return whether the dimension has other indices besides the sample index."""
        return (self.outer, self.inner) != (1, 1) or self.rows is not None

    def at(self, dim: int) -> Layout:
        """Return the same merge at another dimension."""
        return Layout(dim, self.outer, self.inner, self.rows)

    def split(self, size: int, n: int) -> tuple[int, int]:
        """Return outer and inner for a dimension of this size with n samples."""
        if self.outer is None:
            return size // (n * (self.inner or 1)), self.inner or 1
        return self.outer, size // (n * self.outer) if self.inner is None else self.inner

    def __str__(self) -> str:
        if self == WHOLE:
            return "(all)"
        if self.rows is not None:
            return f"({self.dim}, packed)"
        sizes = ["?" if size is None else str(size) for size in (self.outer, self.inner)]
        return f"({self.dim}, {sizes[0]}, {sizes[1]})" if self.merged else f"({self.dim})"


WHOLE = Layout(-1, None, None)
"""The layout of a value in a batch of one: it belongs to the one sample, and no dimension is marked as the batch."""


@dataclass(frozen=True)
class Samples:
    """The kind of one value, its layout if it is batched, and whether a gradient flows through it.

    A batched value without a layout is copies of a parameter's value in an undecided order (`copies`).
    """

    kind: Kind
    layout: Layout | None = None
    traced: bool = False  # a trainable parameter's gradient flows through it
    met: bool = False  # mixing="allow": its op let samples influence each other

    def __str__(self) -> str:
        return f"{self.kind.value}{self.layout}" if self.layout is not None else self.kind.value


# A list for several outputs; None for a number without samples.
SAMPLES: Fact[Samples | list[Samples | None] | None] = Fact("samples", "infer_samples", Samples, list, type(None))
WITH_SAMPLES = (Kind.BATCHED, Kind.MIXED)


def samples_of(node: fx.Node) -> Samples:
    """Return the samples of a node's value, which is one tensor."""
    samples = SAMPLES.of(node)
    assert isinstance(samples, Samples), node.name
    return samples


def samples_of_outputs(node: fx.Node) -> list[Samples | None]:
    """Return the samples of each output of a node, one or several."""
    samples = SAMPLES.of(node)
    return samples if isinstance(samples, list) else [samples]


def taken_from(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the call with several outputs of which a node is one, and its place: ``w.chunk(3)[1]``."""
    source, place = (*node.args, None, None)[:2] if CALL.of(node).op == "getitem" else (None, None)
    if not isinstance(source, fx.Node) or not isinstance(SAMPLES.get(source), list):
        return None
    assert isinstance(place, int)
    return source, place


def kind_of(node: fx.Node) -> Kind | None:
    """Return the kind of a node's value; None for several outputs, and for a number without samples."""
    samples = SAMPLES.of(node)
    return samples.kind if isinstance(samples, Samples) else None


def layout_of(node: fx.Node) -> Layout | None:
    """Return the layout of a node's value; None for one without."""
    samples = SAMPLES.of(node)
    return samples.layout if isinstance(samples, Samples) else None


def holds_samples(samples: Any) -> bool:
    """Decide whether a value, or one of several outputs, is batched or mixed."""
    several = samples if isinstance(samples, list) else [samples]
    return any(one is not None and one.kind in WITH_SAMPLES for one in several)


def samples_first(value: Tensor, layout: Layout, n: int) -> Tensor:
    """Move samples first: ``[.., outer*n*inner, ..] -> [n, .., outer*inner, ..]``; row i is sample i's own value.

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
    outer, inner = layout.split(value.shape[dim], n)
    split = value.reshape(*before, outer, n, inner, *after).movedim(dim + 1, 0)
    return split.reshape(n, *before, outer * inner, *after)
