"""What a parameter's per-sample gradients are a sum of: one part for each use, multiplied out or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxgrad.kernels.norms import as_vectors, bounded, frobenius, in_a_row
from fxgrad.kernels.precision import WIDE, cast, computable, unit
from fxgrad.kernels.sums import summed_rows
from fxgrad.terms.work import Way

Chosen = slice | Tensor  # lines of a parameter, along its first dimension
ChooseWay = Callable[[Any], Way]  # of a `Term`


class Part(ABC):
    """Gradients ``D_n`` of one parameter, ``[n, *shape]``. What a method does not say otherwise, it multiplies out."""

    unrounded: ClassVar[bool] = False  # whether float64 gives the exact gradients: nothing was rounded on the way

    @abstractmethod
    def dense(self, wide: bool = False) -> Tensor:
        """Return the gradient of every sample, ``[n, *shape]``; ``wide``: in float64 from the start."""

    @abstractmethod
    def rounding(self) -> Tensor:
        """``[n]``: how far ‖D_n‖, multiplied out, may be from the norm in exact arithmetic."""

    @abstractmethod
    def own_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample's gradient."""

    @property
    @abstractmethod
    def is_complex(self) -> bool:
        """Return whether complex values were multiplied."""

    @property
    def isometric(self) -> bool:
        """Return whether the norms are those of the factors: no function that changes norms stands between."""
        return True

    def materialised(self) -> Materialised:
        """Return the same, multiplied out."""
        return Materialised(self.dense(), self.rounding())

    def in_full_precision(self) -> Part:
        """Half types as float32: norms and sums are computed in it, up to the cast to the parameter's dtype."""
        return self

    def norms(self, way: ChooseWay) -> Tensor:
        """Norms and bounds, ``[2, n]``; ``way`` chooses how a term is contracted."""
        return self.materialised().norms(way)

    def weighted(self, c: Tensor, wide: bool, onednn: bool) -> Tensor:
        """``Σ_n c_n D_n``, which rounds no more than the norms take into account; ``onednn``: it is the faster one."""
        return summed_rows(self.dense(wide), c)

    def dot(self, vector: Tensor) -> Tensor:
        """``<D_n, vector>`` of a tensor of the parameter's shape, ``[n]``."""
        return as_vectors(self.dense() * vector).sum(1)

    def squares(self) -> Tensor | None:
        """``Σ_n D_n²``, ``[elements]``, where the factors give it at once; None where gradients have to be read."""
        return None

    def gram(self, dtype: torch.dtype) -> Tensor | None:
        """``<D_n, D_m>``, ``[n, n]``, likewise."""
        return None

    def grouped(self, size: int) -> Part:
        """Return the same with ``size`` consecutive samples as one."""
        rows, rounding = self.dense(), self.rounding()
        rounding = rounding + in_a_row(size, rows.dtype) * frobenius(rows)
        total = rows.reshape(rows.shape[0] // size, size, *rows.shape[1:]).sum(1)
        return Materialised(total, rounding.reshape(-1, size).sum(1))

    def added_to(self, total: Tensor) -> Tensor:
        """``total + D``"""
        return total + self.dense()

    def merge_key(self) -> tuple[Any, ...]:
        """Return what parts have in common that `merged` makes one of; merged parts are ordered by its first entry."""
        return 0, id(self)

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> Part:
        """Several parts with one key as one."""
        raise NotImplementedError

    def moved(self, back: Callable[[Tensor], Tensor], traced: Callable[[Sequence[int]], Tensor]) -> Part | None:
        """Return the same behind a function that permutes elements; None where no part of the kind has them there.

        ``back`` is that function, and ``traced`` gives what it makes of a tensor of one shape, without memory.
        """
        return None

    @property
    def has_blocks(self) -> bool:
        """Return whether `block` and `padded` give parts of the kind."""
        return False

    def block(self, starts: Sequence[int], sizes: Sequence[int]) -> Part:
        """Return the gradients of a block of the matrix, which begins at this row and column."""
        raise NotImplementedError

    def padded(self, starts: Sequence[int], sizes: Sequence[int]) -> Part:
        """Return the gradients of a matrix of these sizes, in which the block begins at this row and column."""
        raise NotImplementedError

    def by_lines(self) -> Readable:
        """Return the same as a part whose lines can be read."""
        return Materialised(self.dense())


class Readable(Part):
    """A part that some lines can be read of, a line being an entry along the parameter's first dimension."""

    @property
    @abstractmethod
    def width(self) -> int | None:
        """Return the elements of a line; None where any will do."""

    @abstractmethod
    def read(self, chosen: Chosen, width: int) -> Tensor:
        """Return some lines of ``width`` elements, ``[n, lines * width]``."""

    @abstractmethod
    def pack(self) -> tuple[list[Tensor], list[int]]:
        """Tensors and numbers that say it all."""

    @classmethod
    @abstractmethod
    def unpack(cls, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Readable:
        """Return the part that these tensors and numbers were packed from."""

    def with_others(self, others: Readable) -> Tensor | None:
        """``<D_n, E_m>`` with gradients E of other samples, ``[n, m]``; None where lines of both have to be read."""
        return None

    def touched(self) -> Tensor | None:
        """Return the lines that may be other than zero; None where all may be."""
        return None


@dataclass(frozen=True)
class Packed:
    """Parts as an operator takes them, `Readable.pack` of one behind the other's.

    ``layout`` says it all: ``Product 2 0 Table 2 2`` are two parts, each with how many tensors and numbers it has.
    """

    layout: str
    tensors: list[Tensor]
    numbers: list[int]

    @classmethod
    def of(cls, parts: Sequence[Readable], dtype: torch.dtype) -> Packed:
        """Return some parts, with floating values in a dtype."""
        packed = [part.pack() for part in parts]
        counts = [f"{len(tensors)} {len(numbers)}" for tensors, numbers in packed]
        layout = [f"{type(part).__name__} {count}" for part, count in zip(parts, counts, strict=True)]
        values = [tensor for tensors, _ in packed for tensor in tensors]
        values = [value.to(dtype) if value.is_floating_point() else value for value in values]
        return cls(" ".join(layout), values, [number for _, numbers in packed for number in numbers])

    def parts(self) -> list[Readable]:
        """Return the parts that were packed."""
        kinds = {kind.__name__: kind for kind in Readable.__subclasses__()}
        tensors, numbers, words = iter(self.tensors), iter(self.numbers), iter(self.layout.split())
        return [
            kinds[name].unpack(list(islice(tensors, int(of_tensors))), list(islice(numbers, int(of_numbers))))
            for name, of_tensors, of_numbers in zip(words, words, words, strict=True)
        ]


@dataclass(frozen=True)
class Materialised(Readable):
    """A part that was multiplied out, or that its rule gave so."""

    rows: Tensor  # [n, *shape]
    error: Tensor | None = None  # [n]: see `rounding`; None for what counts as exact, or was measured
    measured: Tensor | None = None  # [2, n]: as `norms`, where the operator that made the rows looked at them

    @property
    def is_complex(self) -> bool:
        return self.rows.is_complex()

    def dense(self, wide: bool = False) -> Tensor:
        return cast(self.rows, WIDE) if wide else self.rows

    def rounding(self) -> Tensor:
        if self.error is not None:
            return self.error
        if self.measured is not None:
            return self.measured[1] - self.measured[0]
        return self.rows.new_zeros(self.rows.shape[0], dtype=torch.float64)

    def own_shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape[1:])

    def materialised(self) -> Materialised:
        return self

    def in_full_precision(self) -> Part:
        return replace(self, rows=computable(self.rows))

    def norms(self, way: ChooseWay) -> Tensor:
        if self.measured is not None:
            return self.measured
        return bounded(self.rows, self.rounding())

    def merge_key(self) -> tuple[Any, ...]:
        return (3,)

    @classmethod
    def merged(cls, parts: Sequence[Part]) -> Materialised:
        """Any parts, multiplied out and added up, with how far rounding may be off."""
        whole = parts[0].materialised()
        for part in parts[1:]:
            more = part.materialised()
            rows = whole.rows + more.rows
            whole = Materialised(rows, whole.rounding() + more.rounding() + unit(rows.dtype) * frobenius(rows))
        return whole

    def moved(self, back: Callable[[Tensor], Tensor], traced: Callable[[Sequence[int]], Tensor]) -> Materialised:
        rows = back(self.rows)
        if rows.is_complex() != self.rows.is_complex():  # of complex rows a real parameter has the real part
            return Materialised(rows, self.rounding())
        return Materialised(rows, self.error, self.measured)

    def by_lines(self) -> Readable:
        return self

    @property
    def width(self) -> None:
        return None

    def read(self, chosen: Chosen, width: int) -> Tensor:
        return self.rows.reshape(self.rows.shape[0], -1, width)[:, chosen].flatten(1)

    def pack(self) -> tuple[list[Tensor], list[int]]:
        return [self.rows], []

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Materialised:
        return cls(tensors[0])


def part_of(value: Part | Tensor) -> Part:
    """Return a part, of a tensor that a rule gave: what is multiplied out already counts as exact."""
    return value if isinstance(value, Part) else Materialised(value)
