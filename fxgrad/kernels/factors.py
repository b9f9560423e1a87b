"""Factors of a term that are not tensors: a table's rows by their ids, and a convolution's windows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fxgrad.kernels.settings import Settings


@dataclass(frozen=True)
class OneHot:
    """A factor ``[n, k.., classes]`` that is 1 where ``ids`` says so; rows of ``padding_idx`` are 0."""

    ids: Tensor  # [n, k..]
    classes: int
    padding_idx: int | None = None

    @property
    def padding(self) -> int:
        """``padding_idx`` as operators have it: -1 for none."""
        return -1 if self.padding_idx is None else self.padding_idx


@dataclass(frozen=True)
class Patches:
    """A factor ``[n, k.., in/groups * kernel]``: the windows of ``input`` that a convolution looks at."""

    input: Tensor  # [n, k, channels, *space]
    kernel: tuple[int, ...]  # the weight's own shape
    settings: Settings


Factor = Tensor | OneHot | Patches
