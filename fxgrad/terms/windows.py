"""Windows of an image that meet a convolution's weight, ``D_n = Σ_k g_nk ⊗ window_nk``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from sympy import Integer
from torch import Tensor

from fxgrad.kernels.convolutions import lines_of_windows
from fxgrad.kernels.dense import conv_weight_grad
from fxgrad.kernels.factors import Factor, Patches
from fxgrad.kernels.norms import Norms, frobenius
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.sums import window_sum
from fxgrad.kernels.windows import window_norms, window_rounding, window_rows
from fxgrad.ops.equation import Equation
from fxgrad.samples.symbols import elements
from fxgrad.terms.base import Term, in_groups, is_one
from fxgrad.terms.part import ChooseWay, Chosen, Materialised, Readable
from fxgrad.terms.work import Costs, CostTable, Measures, Way, Work, c, e, f, k, n, o, p, s, w

if TYPE_CHECKING:
    from typing_extensions import Self

# The gradient itself is made by a kernel that copies each sample, keeps its sums in registers and looks at each
# weight's gradient once, in the cache. Windows' Gram matrices are added up from the pixels', shift by shift.
GRAMS = 1 << 20  # bytes of Gram matrices that one round of calls looks at
_SUM = Work(kernel=2 * n * k * w, memory=2 * e * n * s, call=Integer(8))
COSTS = CostTable(
    "windows",
    (k, w, p, c, o, f, s),
    {
        Way.GRAM: Costs(
            Work(
                batched=2 * n * (p**2 * c + k**2 * o),
                memory=e * n * s,
                cache=(6 * f + 13) * e * n * k**2,
                call=(30 + 8 * f) * (1 + e * n * p**2 / GRAMS),
            ),
            _SUM,
        ),
        Way.RECOMPUTE: Costs(
            Work(
                kernel=2 * n * k * w,
                memory=e * n * s,
                cache=e * n * (s + w),
                call=Integer(20),
            ),
            _SUM,
        ),
        Way.MATERIALISE: Costs(
            Work(
                kernel=2 * n * k * w,
                memory=e * n * (s + w),
                cache=e * n * (s + 2 * w),
                call=Integer(20),
            ),
            Work(memory=e * n * w, call=Integer(2)),
        ),
    },
)


class Windows(Term, Readable):
    """``nko...,nk...i->noi`` of a tensor and `Patches`."""

    costs = COSTS
    unrounded = True

    @classmethod
    def takes(cls, equation: Equation, factors: Sequence[Factor]) -> bool:
        return len(factors) == 2 and isinstance(factors[0], Tensor) and isinstance(factors[1], Patches)

    @classmethod
    def of(cls, g: Tensor, patches: Patches) -> Self:
        """The gradient of a weight from g ``[n, k, out, *space]`` and what the convolution looks at."""
        return cls("nko...,nk...i->noi", g, patches)

    def parts(self) -> tuple[Tensor, Patches]:
        """g and the windows."""
        g, patches = self.factors
        assert isinstance(g, Tensor) and isinstance(patches, Patches)
        return g, patches

    def _met(self) -> Tensor:
        """What meets the weights of one window with each of its pixels."""
        g, patches = self.parts()
        return patches.input if patches.settings.transposed else g

    def _positions(self) -> list[int]:
        """The images of a sample, and their sizes in space."""
        met = self._met()
        return [met.shape[1], *met.shape[3:]]

    def contracted(self) -> Tensor:
        return conv_weight_grad(*self.parts())

    def result_shape(self) -> tuple[int, ...]:
        return self.parts()[1].kernel

    def rounding(self, made: float | None = None) -> Tensor:
        g, patches = self.parts()
        copies = math.prod(patches.kernel[2:])
        return window_rounding(frobenius(g), frobenius(patches.input), self._positions(), copies, g.dtype)

    def _materialised(self) -> Materialised:
        g, patches = self.parts()
        return self._measured(*window_rows(g, patches.input, patches.kernel, patches.settings.numbers()))

    def _norms(self, way: ChooseWay) -> Norms:
        g, patches = self.parts()
        gram = way(self) is Way.GRAM
        norms, bounds = window_norms(g, patches.input, patches.kernel, patches.settings.numbers(), gram)
        return norms, bounds

    def _weighted(self, c: Tensor, onednn: bool) -> Tensor:
        g, patches = self.parts()
        total: Tensor = window_sum(g, patches.input, c, patches.kernel, patches.settings.numbers())
        return total

    def dot(self, vector: Tensor) -> Tensor:
        """The convolution's output with the tensor in the weight's place, times g."""
        g, patches = self.parts()
        x, weight = patches.input.flatten(0, 1).to(vector.dtype), vector.reshape(patches.kernel)
        y = torch.convolution(x, weight, None, *patches.settings)
        return (g.flatten(0, 1) * y).view(g.shape[0], -1).sum(1)

    def grouped(self, size: int) -> Term:
        g, patches = self.parts()
        return self.with_factors(in_groups(g, size), replace(patches, input=in_groups(patches.input, size)))

    def by_lines(self) -> Readable:
        return super().by_lines() if self._is_plain() else Materialised(self.dense())

    def _is_plain(self) -> bool:
        settings = self.parts()[1].settings
        return not settings.transposed and settings.groups == 1

    @property
    def lines(self) -> tuple[int, int]:
        kernel = self.parts()[1].kernel
        return kernel[0], math.prod(kernel[1:])

    def read(self, chosen: Chosen, width: int) -> Tensor:
        g, patches = self.parts()
        return lines_of_windows(g[:, :, chosen], patches.input, patches.kernel, patches.settings)

    def pack(self) -> tuple[list[Tensor], list[int]]:
        g, patches = self.parts()
        return [g, patches.input], [len(patches.kernel), *patches.kernel, *patches.settings.numbers()]

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Self:
        (g, input), (rank, *others) = tensors, numbers
        return cls.of(g, Patches(input, tuple(others[:rank]), Settings.of(others[rank:])))

    def _products(self) -> Any:
        return math.prod(self._met().shape[1:]) * math.prod(self.parts()[1].kernel[1:])

    def _measures(self) -> Measures:
        (g, patches), positions = self.parts(), math.prod(self._positions())
        x, kernel, weights = patches.input, patches.kernel, math.prod(patches.kernel)
        factors = math.prod(g.shape[1:]) + math.prod(x.shape[1:])
        shifts = math.prod(kernel[2:])
        sizes = (positions, weights, math.prod(x.shape[3:]), x.shape[2], g.shape[2], shifts, factors)
        gram = is_one(g.shape[1]) and self._is_plain()
        ways = tuple(way for way in COSTS.costs if way is not Way.GRAM or gram)
        return Measures(COSTS, sizes, ways, factors, weights)

    def flops(self) -> sympy.Expr:
        return 2 * elements(self._met()) * math.prod(self.parts()[1].kernel[1:])
