"""The settings of a convolution, as operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Settings(NamedTuple):
    """The arguments of a convolution besides its kernel, in the order of PyTorch's own operators."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def numbers(self) -> list[int]:
        """Return the settings as one argument of an operator, which takes lists and no tuples of lists."""
        stride, padding, dilation, transposed, output_padding, groups = self
        return [*stride, *padding, *dilation, *output_padding, int(transposed), groups]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Settings:
        """`numbers`, read again."""
        d = len(numbers) // 4
        stride, padding, dilation, output_padding = (numbers[i * d : (i + 1) * d] for i in range(4))
        return cls(stride, padding, dilation, bool(numbers[-2]), output_padding, numbers[-1])
