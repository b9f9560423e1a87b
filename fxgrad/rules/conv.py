"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxgrad.kernels.settings import Settings
from fxgrad.rules.registry import rule
from fxgrad.terms import Patches, Term


def _each(value, spatial):
    """An int or a list of one, as one number per spatial dimension."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * spatial if len(values) == 1 else values


def _has_images(use, shapes):
    """The rules need the images in a dimension of their own, which may be missing in a batch of one."""
    input, weight = use.arguments["input"], use.arguments["weight"]
    return len(shapes[input.position]) == len(shapes[weight.position])


@rule(
    torch.conv1d, torch.conv2d, torch.conv3d,
    of=("weight", "bias"), batched=("input",), applies=_has_images,
)  # fmt: skip
def conv(g, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """y = W ∗ x + b      dW_n = Σ_k g_nk ⊗ patch_nk(x)      db_n = Σ_k g_nk"""
    spatial = weight.dim() - 2
    stride, dilation = _each(stride, spatial), _each(dilation, spatial)
    if padding == "same":
        input, padding = _pad_same(input, weight.shape[2:], dilation)
    padding = (0,) * spatial if padding == "valid" else _each(padding, spatial)
    settings = Settings(stride, padding, dilation, False, (0,) * spatial, groups)
    patches = Patches(input, tuple(weight.shape), settings)
    return {"weight": Term("nko...,nk...i->noi", g, patches), "bias": Term("nko...->no", g)}


def _pad_same(input, kernel, dilation):
    """padding="same" as PyTorch has it: the odd one goes to the right."""
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if all(total % 2 == 0 for total in totals):
        return input, tuple(total // 2 for total in totals)
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return F.pad(input, sides), 0


@rule(
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
    of=("weight", "bias"), batched=("input",), applies=_has_images,
)  # fmt: skip
def conv_transpose(g, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """y = Wᵀ ∗ x + b      dW_n = Σ_k x_nk ⊗ patch_nk(g)      db_n = Σ_k g_nk"""
    spatial = weight.dim() - 2
    stride, padding, dilation, extra = (_each(value, spatial) for value in (stride, padding, dilation, output_padding))
    patches = Patches(input, tuple(weight.shape), Settings(stride, padding, dilation, True, extra, groups))
    return {"weight": Term("nko...,nk...i->noi", g, patches), "bias": Term("nko...->no", g)}
