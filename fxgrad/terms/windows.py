"""Windows of an image that meet a convolution's weight, ``D_n = Σ_k g_nk ⊗ window_nk``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from sympy import Integer
from torch import Tensor

from fxgrad.kernels.convolutions import lines_of_windows
from fxgrad.kernels.dense import conv_weight_grad
from fxgrad.kernels.factors import Factor, Patches
from fxgrad.kernels.norms import BLOCK_ON_GPU, frobenius
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.sums import window_sum
from fxgrad.kernels.windows import window_norms, window_rounding, window_rows
from fxgrad.ops.equation import Equation
from fxgrad.samples.symbols import elements
from fxgrad.terms.base import Term, in_groups, is_one
from fxgrad.terms.part import ChooseWay, Chosen, Materialised, Readable
from fxgrad.terms.work import Costs, CostTable, Way, Work, c, e, f, k, n, o, p, s, w

# The gradient itself is made by a kernel that copies each sample, keeps its sums in registers and looks at each
# weight's gradient once, in the cache. Windows' Gram matrices are added up from the pixels', shift by shift: by a
# kernel on a CPU, by PyTorch's ops on a GPU.
MEANWHILE = 4 << 20  # bytes that a GPU reads or writes while it launches a kernel
_SUM = Work(kernel=2 * n * k * w, memory=2 * e * n * s, call=Integer(8), launch=Integer(6))
COSTS = CostTable(
    "windows",
    (k, w, p, c, o, f, s),
    {
        Way.GRAM: Costs(
            Work(
                kernel=n * (p * (p + 16) * c + k * (k + 16) * o),
                memory=e * n * s,
                cache=e * n * ((f + 5) * k**2 + 2 * p**2),
                call=Integer(30),
                launch=(30 + 8 * f) * (1 + e * n * p**2 / BLOCK_ON_GPU) + f * e * n * k**2 / MEANWHILE,
            ),
            _SUM,
        ),
        Way.RECOMPUTE: Costs(
            Work(kernel=2 * n * k * w, memory=e * n * s, cache=e * n * (s + w), call=Integer(20), launch=Integer(10)),
            _SUM,
        ),
        Way.MATERIALISE: Costs(
            Work(
                kernel=2 * n * k * w,
                memory=e * n * (s + w),
                cache=e * n * (s + 2 * w),
                call=Integer(20),
                launch=Integer(10),
            ),
            Work(memory=e * n * w, call=Integer(2), launch=Integer(1)),
        ),
    },
)


class Windows(Term, Readable):
    """``nko...,nk...i->noi`` of a tensor and `Patches`."""

    costs = COSTS
    factor_types = (Tensor, Patches)
    unrounded = True

    g: Tensor
    patches: Patches

    def __init__(self, equation: str | Equation, *factors: Factor, shape: Sequence[int] | None = None) -> None:
        super().__init__(equation, *factors, shape=shape)
        self.g, self.patches = factors  # type: ignore[assignment]

    @classmethod
    def of(cls, g: Tensor, patches: Patches) -> Windows:
        """Return the gradient of a weight from g ``[n, k, out, *space]`` and what the convolution looks at."""
        return cls("nko...,nk...i->noi", g, patches)

    def _met(self) -> Tensor:
        """Return what meets the weights of one window with each of its pixels."""
        return self.patches.input if self.patches.settings.transposed else self.g

    def _positions(self) -> list[int]:
        """Return the images of a sample, and their sizes in space."""
        met = self._met()
        return [met.shape[1], *met.shape[3:]]

    def _operands(self) -> tuple[Tensor, Tensor, tuple[int, ...], list[int]]:
        """Return what operators take: g, the images, the weight's shape, and the convolution's settings."""
        return self.g, self.patches.input, self.patches.kernel, self.patches.settings.numbers()

    def contracted(self) -> Tensor:
        return conv_weight_grad(self.g, self.patches)

    def result_shape(self) -> tuple[int, ...]:
        return self.patches.kernel

    def rounding(self, made: float | None = None) -> Tensor:
        norms, copies = (frobenius(self.g), frobenius(self.patches.input)), math.prod(self.patches.kernel[2:])
        return window_rounding(*norms, self._positions(), copies, self.g.dtype)

    def _materialised(self) -> Materialised:
        return self._measured(*window_rows(*self._operands()))

    def _norms(self, way: ChooseWay) -> Tensor:
        return window_norms(*self._operands(), way(self) is Way.GRAM)

    def _weighted(self, c: Tensor, onednn: bool) -> Tensor:
        g, input, *sizes = self._operands()
        total: Tensor = window_sum(g, input, c, *sizes)
        return total

    def dot(self, vector: Tensor) -> Tensor:
        """Return the convolution's output with the tensor in the weight's place, times g."""
        g, patches = self.g, self.patches
        x, weight = patches.input.flatten(0, 1).to(vector.dtype), vector.reshape(patches.kernel)
        y = torch.convolution(x, weight, None, *patches.settings)
        return (g.flatten(0, 1) * y).view(g.shape[0], -1).sum(1)

    def grouped(self, size: int) -> Term:
        images = in_groups(self.patches.input, size)
        return self.with_factors(in_groups(self.g, size), replace(self.patches, input=images))

    def by_lines(self) -> Readable:
        return super().by_lines() if self._is_plain() else Materialised(self.dense())

    def _is_plain(self) -> bool:
        settings = self.patches.settings
        return not settings.transposed and settings.groups == 1

    def read(self, chosen: Chosen, width: int) -> Tensor:
        patches = self.patches
        return lines_of_windows(self.g[:, :, chosen], patches.input, patches.kernel, patches.settings)

    def pack(self) -> tuple[list[Tensor], list[int]]:
        g, input, kernel, settings = self._operands()
        return [g, input], [len(kernel), *kernel, *settings]

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Windows:
        (g, input), (rank, *others) = tensors, numbers
        return cls.of(g, Patches(input, tuple(others[:rank]), Settings.of(others[rank:])))

    def _products(self) -> Any:
        return math.prod(self._met().shape[1:]) * math.prod(self.patches.kernel[1:])

    def _table_sizes(self) -> tuple[Any, ...]:
        x, kernel = self.patches.input, self.patches.kernel
        positions, pixels, shifts = math.prod(self._positions()), math.prod(x.shape[3:]), math.prod(kernel[2:])
        return positions, math.prod(kernel), pixels, x.shape[2], self.g.shape[2], shifts, self._factor_elements()

    def _ways(self) -> tuple[Way, ...]:
        gram = is_one(self.g.shape[1]) and self._is_plain()
        return tuple(way for way in COSTS.costs if way is not Way.GRAM or gram)

    def flops(self) -> sympy.Expr:
        return 2 * elements(self._met()) * math.prod(self.patches.kernel[1:])
