"""Elementwise ops: one rule for the whole family.

y_i = f(x_i, w_i) with broadcasting. Hand every sample its own copy of the parameters; then the plain
vector-Jacobian product of the op is already per sample, and what broadcasting repeated is summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.kernels.precision import computable
from fxgrad.rules.reduce import sum_dims, summed_to
from fxgrad.rules.registry import rule
from fxgrad.rules.uses import Slot
from fxgrad.terms import Term

# Ops whose derivative by a parameter is a product or a quotient of what they are given: rounded once or twice, and no
# number is taken from another. The derivative of any other one is computed in float64 where norms are bounded.
ROUNDED_ONCE = frozenset(
    """add sub rsub mul div neg abs where maximum minimum max min clamp clamp_min clamp_max addcmul addcdiv square
    relu prelu leaky_relu masked_fill copy clone to float double half bfloat16 positive sqrt exp""".split()
)


def elementwise(g: Tensor, use: Any, values: list[Any]) -> dict[int, Term | Tensor]:
    """dw_n = Σ over broadcast positions of g_n · ∂f/∂w"""
    n, ndim = g.shape[0], g.dim() - 1
    values = [computable(value) if isinstance(value, Tensor) else value for value in values]
    copies = list(values)
    for slot, value in enumerate(values):
        if slot in use.wrt:
            padded = value.reshape((1,) * (ndim - value.dim()) + tuple(value.shape))
            copies[slot] = padded.expand(g.shape)  # so that what broadcasting repeats is summed here, not by autograd
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
        y, vjp, *_ = torch.func.vjp(call, *weights)
        grads = vjp(g.to(y.dtype))
    return {slot: summed_to(grad, values[slot].shape) for slot, grad in zip(use.wrt, grads, strict=True)}


@rule(F.prelu, of=("input", "weight"), batched=("input",), shared=True)
def prelu(g, input, weight):
    """y = max(x, 0) + w min(x, 0)      dw_n = Σ_k g_nk min(x_nk, 0), per channel (dim 1)      dx_n = g_n y′(x)"""
    grad = computable(g) * computable(input).clamp(max=0)
    alone = weight.numel() == 1
    slope = weight if alone else weight.view(-1, *[1] * (g.dim() - 3))
    dims = [dim for dim in range(1, grad.dim()) if alone or dim != 2]
    return {"weight": sum_dims(grad, dims, weight.shape), "input": torch.where(input > 0, g, slope * g)}
