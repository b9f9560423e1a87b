"""Half types hold too few digits to compute gradients in: everything about them is computed in float32.

The products of two numbers of a half type are exact in float32; what is delivered is cast back at the very end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FULL = dict.fromkeys(HALF, torch.float32)
WIDE = dict.fromkeys((*HALF, torch.float32), torch.float64) | {torch.complex64: torch.complex128}


@functools.cache
def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff: how far a rounded number may be off, relative to itself."""
    return torch.finfo(dtype).eps / 2


NARROW = {"tf32": 11, "bf16": 8}  # digits that factors keep, by the setting of a backend


def rounding_of_factors(value: Tensor) -> float:
    """Return how far float32 products may be off, relative to them, where PyTorch may round their factors before.

    ``torch.set_float32_matmul_precision`` allows that, and ``torch.backends.mkldnn.conv`` for convolutions on CPU.
    """
    if value.dtype is not torch.float32:
        return 0.0
    on_gpu, *on_cpu = settings_of_products()
    settings = [on_gpu] if value.is_cuda else on_cpu
    return max(2.01 * 2.0 ** -NARROW.get(setting, math.inf) for setting in settings)


def settings_of_products() -> list[str]:
    """Return how float32 factors may be rounded: of products on CUDA, and of products and convolutions on CPU."""
    backends: Any = torch.backends
    return [library.fp32_precision for library in (backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv)]


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms and sums are taken in: float32 for half types, the dtype itself for others."""
    return torch.float32 if dtype in HALF else dtype


def computable(value: Tensor) -> Tensor:
    """Half types as float32; others as they are."""
    return cast(value, FULL)


def cast(value: Tensor, dtypes: Mapping[torch.dtype, torch.dtype]) -> Tensor:
    """Return a value of some dtypes in others."""
    return value.to(dtypes[value.dtype]) if value.dtype in dtypes else value


def at_most(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights rounded towards zero: near the smallest numbers of a dtype rounding is no small matter."""
    if torch.promote_types(weight.dtype, dtype) == dtype:
        return weight.to(dtype)
    rounded = weight.to(dtype)
    larger = rounded.to(weight.dtype).abs() > weight.abs()
    return torch.where(larger, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted `relative_error`, by dtype of the parameters (the coarsest of them decides)."""


def wide(t: Tensor) -> Tensor:
    """Real and in double precision."""
    t = t.detach()
    return torch.view_as_real(t.to(torch.complex128).resolve_conj()) if t.is_complex() else t.to(torch.float64)
