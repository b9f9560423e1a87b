"""Parse einsum's notation once: ``n...o,n...i->noi`` as an `Equation`."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

SAMPLE = "n"  # the letter of the sample dimension in the equations of terms


@dataclass(frozen=True)
class Subscripts:
    """The letters of one operand, ``before...after``. Without dots, all of them are in ``before``."""

    before: str
    dots: bool = False
    after: str = ""

    @classmethod
    def of(cls, text: str) -> Subscripts:
        """Parse one operand's part of an equation."""
        before, dots, after = text.partition("...")
        return cls(before, bool(dots), after)

    @property
    def letters(self) -> str:
        """Return the letters without the dots."""
        return self.before + self.after

    def names(self, rank: int) -> list[str]:
        """Name each of ``rank`` dimensions; those behind the dots are counted back: ``.2``, ``.1``.

        >>> Subscripts.of("n...o").names(4)
        ['n', '.2', '.1', 'o']
        """
        middle = rank - len(self.letters) if self.dots else 0
        return [*self.before, *(f".{i}" for i in range(middle, 0, -1)), *self.after]

    def __str__(self) -> str:
        return f"{self.before}{'...' if self.dots else ''}{self.after}"


@dataclass(frozen=True)
class Equation:
    """An einsum equation. ``output`` is None where the text has no arrow."""

    inputs: tuple[Subscripts, ...]
    output: Subscripts | None

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(text: str) -> Equation:
        """Parse a text; spaces have no meaning.

        >>> str(Equation.of("n...o, n...i -> noi"))
        'n...o,n...i->noi'
        """
        left, arrow, right = text.replace(" ", "").partition("->")
        return Equation(tuple(map(Subscripts.of, left.split(","))), Subscripts.of(right) if arrow else None)

    def __str__(self) -> str:
        inputs = ",".join(map(str, self.inputs))
        return inputs if self.output is None else f"{inputs}->{self.output}"

    def fault(self, ranks: Sequence[int | None]) -> str:
        """Say why it is no equation of a term, for factors of these ranks (None: not a tensor); empty if it is one.

        >>> Equation.of("ab,bc").fault([2, 2])
        "has no '->'"
        """
        if self.output is None:
            return "has no '->'"
        if len(self.inputs) != len(ranks):
            return f"has {len(self.inputs)} operand(s) for {len(ranks)} factor(s)"
        known = "".join(operand.letters for operand in self.inputs)
        for letter in known + self.output.letters:
            if letter not in string.ascii_letters:
                return f"has {letter!r}, which is no letter"
            if letter not in known:
                return f"has {letter!r} in its result, and in no operand"
        for operand, rank in zip(self.inputs, ranks, strict=True):
            further = 0 if rank is None else rank - len(operand.letters)
            if further < 0 or (further > 0 and not operand.dots):
                return f"has the operand '{operand}' for a factor of {rank} dimension(s)"
        if self.output.before[:1] not in {operand.before[:1] for operand in self.inputs} - {""}:
            return "has a result that does not begin with the samples"
        return ""

    @cached_property
    def is_product(self) -> bool:
        """Return whether it is ``n...o,n...i->noi`` in any letters: a sum of outer products over positions."""
        if len(self.inputs) != 2 or self.output is None:
            return False
        o, i = (operand.after for operand in self.inputs)
        over_positions = all(operand == Subscripts(SAMPLE, True, operand.after) for operand in self.inputs)
        own_letters = len(o) == len(i) == 1 and len({SAMPLE, o, i}) == 3
        return over_positions and own_letters and self.output == Subscripts(SAMPLE + o + i)

    @cached_property
    def is_entrywise(self) -> bool:
        """Return whether all operands have the same letters: their entries are multiplied one by one, then summed."""
        return len(set(self.inputs)) == 1

    @cached_property
    def has_shared_operand(self) -> bool:
        """Return whether some operand has no sample dimension in front."""
        return any(not operand.before.startswith(SAMPLE) for operand in self.inputs)

    @cached_property
    def parts(self) -> tuple[Subscripts, ...]:
        """Return the letters of each operand, and of the output."""
        return self.inputs if self.output is None else (*self.inputs, self.output)

    @cached_property
    def has_dots(self) -> bool:
        """Return whether dots stand for dimensions of some operand, or of the output."""
        return any(part.dots for part in self.parts)

    @cached_property
    def repeats_a_letter(self) -> bool:
        """Return whether some operand, or the output, has a letter twice: a diagonal."""
        return any(len(set(part.letters)) < len(part.letters) for part in self.parts)

    def names(self, ranks: Sequence[int]) -> list[list[str]]:
        """Name each dimension of each operand; see `Subscripts.names`."""
        return [operand.names(rank) for operand, rank in zip(self.inputs, ranks, strict=True)]

    def output_names(self, ranks: Sequence[int]) -> list[str]:
        """Name each dimension of the result."""
        if self.output is None:
            return []
        behind_dots = [
            rank - len(operand.letters) for operand, rank in zip(self.inputs, ranks, strict=True) if operand.dots
        ]
        return self.output.names(max(behind_dots, default=0) * self.output.dots + len(self.output.letters))

    def sizes(self, shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return the size of each name. Where operands disagree, the size that is not one: the other is broadcast.

        >>> Equation.of("n...,n...i->ni").sizes([(2, 5), (2, 1, 3)])
        {'n': 2, '.1': 5, 'i': 3}
        """
        sizes: dict[str, Any] = {}
        for names, shape in zip(self.names([len(shape) for shape in shapes]), shapes, strict=True):
            for name, size in zip(names, shape, strict=True):
                if name not in sizes or not (isinstance(size, int) and size == 1):
                    sizes[name] = size
        return sizes

    def summed(self, ranks: Sequence[int]) -> list[str]:
        """Return the names that the result does not have."""
        kept = set(self.output_names(ranks))
        every = dict.fromkeys(name for names in self.names(ranks) for name in names)
        return [name for name in every if name not in kept]

    def in_groups(self) -> Equation:
        """Return the same with one more summed letter behind the samples: the members of a group.

        >>> str(Equation.of("n...o->no").in_groups())
        'na...o->no'
        """
        letter = self._free_letter()
        inputs = (
            Subscripts(SAMPLE + letter + operand.before[1:], operand.dots, operand.after)
            if operand.before.startswith(SAMPLE)
            else operand
            for operand in self.inputs
        )
        return Equation(tuple(inputs), self.output)

    def without(self, letter: str) -> Equation:
        """Return the same with another letter in its place, which makes this one free.

        >>> str(Equation.of("bnd,de->bne").without("n"))
        'bad,de->bae'
        """
        return Equation.of(str(self).replace(letter, self._free_letter(letter)))

    def _free_letter(self, taken: str = "") -> str:
        return next(letter for letter in string.ascii_letters if letter not in str(self) + taken)
