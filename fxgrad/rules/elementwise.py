"""Elementwise ops: one rule for the whole family.

y_i = f(x_i, w_i) with broadcasting. Hand every sample its own copy of the parameters; then the plain
vector-Jacobian product of the op is already per sample, and what broadcasting repeated is summed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxgrad.rules.reduce import sum_to
from fxgrad.rules.registry import rule


def elementwise(g, use, values):
    """dw_n = Σ over broadcast positions of g_n · ∂f/∂w"""
    n, one_sample = g.shape[0], g.shape[1:]
    copies = list(values)
    for slot in use.wrt:
        missing = len(one_sample) - values[slot].dim()
        padded = values[slot].reshape(*[1] * missing, *values[slot].shape)
        copies[slot] = padded.expand(n, *padded.shape)

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


@rule(F.prelu, of=("weight",), batched=("input",))
def prelu(g, input, weight):
    """y = max(x, 0) + w min(x, 0)      dw_n = Σ_k g_nk min(x_nk, 0), per channel (dim 1)"""
    grad = g * input.clamp(max=0)
    if weight.numel() == 1:
        return {"weight": grad.flatten(1).sum(1).reshape(grad.shape[0], *weight.shape)}
    return {"weight": grad.sum([dim for dim in range(1, grad.dim()) if dim != 2])}
