"""Elementwise ops: one rule for the whole family.

y_i = f(x_i, w_i) with broadcasting. Hand every sample its own copy of the parameters; then the plain
vector-Jacobian product of the op is already per sample, and what broadcasting repeated is summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.rules.reduce import sum_to
from fxgrad.rules.registry import rule
from fxgrad.uses import Slot


def elementwise(g: Tensor, use: Any, values: list[Any]) -> dict[int, Tensor]:
    """dw_n = Σ over broadcast positions of g_n · ∂f/∂w"""
    n, ndim = g.shape[0], g.dim() - 1
    copies = list(values)
    for slot, value in enumerate(values):
        if slot in use.wrt:
            padded = value.reshape((1,) * (ndim - value.dim()) + tuple(value.shape))
            copies[slot] = padded.expand(n, *padded.shape)
        elif use.layouts[slot] is not None and value is not None:  # new dims go behind the samples
            copies[slot] = value.reshape(n, *(1,) * (ndim + 1 - value.dim()), *value.shape[1:])
        elif use.inplace and use.args[0] == Slot(slot):  # written to by every sample
            copies[slot] = value.expand(n, *value.shape)

    def call(*weights):
        filled = list(copies)
        for slot, weight in zip(use.wrt, weights, strict=True):
            filled[slot] = weight
        return use.rerun(filled)

    with torch.enable_grad():
        weights = [copies[slot] for slot in use.wrt]
        grads = torch.func.vjp(call, *weights)[1](g)
    return {
        slot: sum_to(grad, values[slot].shape) for slot, grad in zip(use.wrt, grads, strict=True)
    }


@rule(F.prelu, of=("input", "weight"), batched=("input",), shared=True)
def prelu(g, input, weight):
    """y = max(x, 0) + w min(x, 0)      dw_n = Σ_k g_nk min(x_nk, 0), per channel (dim 1)      dx_n = g_n y′(x)"""
    grad = g * input.clamp(max=0)
    if weight.numel() == 1:
        slope, by_weight = weight, grad.flatten(1).sum(1).reshape(grad.shape[0], *weight.shape)
    else:
        slope = weight.view(-1, *[1] * (g.dim() - 3))
        by_weight = grad.sum([dim for dim in range(1, grad.dim()) if dim != 2])
    return {"weight": by_weight, "input": torch.where(input > 0, g, slope * g)}
