"""Affine parameters of normalisation layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fxgrad.kernels.precision import computable
from fxgrad.rules.reduce import sum_positions
from fxgrad.rules.registry import rule
from fxgrad.terms import Term


def _like_forward(input, normalise):
    """x̂ as the forward computes it, of its own tensor: a compiler that looks for common subexpressions finds it."""
    return normalise(computable(input).flatten(0, 1)).view_as(input)


@rule(F.layer_norm, of=("weight", "bias"), batched=("input",), ignore={"cudnn_enable": "it chooses a kernel"})
def layer_norm(g, input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """y = x̂ ⊙ w + b      dw_n = Σ_k g_nk ⊙ x̂_nk      db_n = Σ_k g_nk"""
    x_hat = _like_forward(input, lambda rows: F.layer_norm(rows, normalized_shape, eps=eps))
    keep = len(normalized_shape)
    return {"weight": sum_positions(computable(g) * x_hat, keep), "bias": sum_positions(g, keep)}


@rule(F.rms_norm, of=("weight",), batched=("input",))
def rms_norm(g, input, normalized_shape, weight=None, eps=None):
    """y = x̂ ⊙ w          dw_n = Σ_k g_nk ⊙ x̂_nk"""
    x_hat = _like_forward(input, lambda rows: F.rms_norm(rows, normalized_shape, eps=eps))
    return {"weight": sum_positions(computable(g) * x_hat, len(normalized_shape))}


def _per_channel(g, x_hat):
    """Σ over positions of ``[n, k, channels, *space]``; a product would be written to memory for the two sums of it."""
    return {"weight": Term("nkc...,nkc...->nc", computable(g), x_hat), "bias": Term("nkc...->nc", g)}


@rule(F.group_norm, of=("weight", "bias"), batched=("input",), ignore={"cudnn_enabled": "it chooses a kernel"})
def group_norm(g, input, num_groups, weight=None, bias=None, eps=1e-5):
    """y = x̂ ⊙ w + b, x̂ normalised over groups of channels"""
    rows = computable(input).flatten(0, 1)
    mean, rstd = _statistics(rows, num_groups, eps)
    return _per_channel(g, ((rows - mean) * rstd).view_as(input))


# Note [Statistics of a group]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# They are asked for as the forward does it, of the same tensor: a compiler that looks for common subexpressions takes
# them from there. Then each channel gets a copy of its group's in memory, because a loop over channels that looks up
# groups is not vectorised. as_strided makes Inductor write it, as in PyTorch's own decomposition of group_norm.


def _statistics(rows, groups, eps):
    """μ and 1/σ of ``[n, channels, *space]``, both ``[n, channels, 1..]``: see Note [Statistics of a group]."""
    n, channels, *space = rows.shape
    settings = (n, channels, math.prod(space), groups, eps)
    _, *found = torch.native_group_norm(rows.contiguous(), None, None, *settings)
    copied = (one.unsqueeze(2).expand(n, groups, channels // groups).contiguous() for one in found)
    return [one.as_strided((n, channels), (channels, 1)).view(n, channels, *[1] * len(space)) for one in copied]


@rule(
    F.instance_norm,
    of=("weight", "bias"),
    batched=("input",),
    ignore={"momentum": "it moves the buffers in the forward", "cudnn_enabled": "it chooses a kernel"},
)
def instance_norm(
    g, input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, eps=1e-5
):
    """y = x̂ ⊙ w + b, x̂ normalised over each channel's positions"""
    if not use_input_stats:
        return _per_channel(g, _standardised(input, running_mean, running_var, eps))
    return _per_channel(g, _like_forward(input, lambda rows: F.instance_norm(rows, eps=eps)))


@rule(
    F.batch_norm,
    of=("weight", "bias"),
    batched=("input",),
    ignore={"momentum": "it moves the buffers in the forward", "cudnn_enabled": "it chooses a kernel"},
)
def batch_norm(g, input, running_mean=None, running_var=None, weight=None, bias=None, training=False, eps=1e-5):
    """y = (x - μ) / sqrt(σ² + ε) ⊙ w + b with the running μ and σ², or the batch's (mixing="allow")"""
    if training or running_mean is None:
        dims = [dim for dim in range(input.dim()) if dim != 2]
        running_var, running_mean = torch.var_mean(computable(input), dims, correction=0)
    return _per_channel(g, _standardised(input, running_mean, running_var, eps))


def _standardised(input, mean, var, eps):
    shape = (-1, *[1] * (input.dim() - 3))
    mean, var = computable(mean).view(shape), computable(var).view(shape)
    return (computable(input) - mean) * torch.rsqrt(var + eps)
