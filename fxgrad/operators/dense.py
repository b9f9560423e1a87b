"""Per-sample gradients themselves, of products and of convolutions: large ones into fresh memory on huge pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxgrad.operators import product_kernel
from fxgrad.operators.convolutions import Settings, weight_grads
from fxgrad.operators.memory import ANY_LAYOUT, fresh

if TYPE_CHECKING:
    from fxgrad.terms import Patches

LARGE = 64 << 10  # bytes of one sample's gradient from which fresh memory decides the time on CPU


def products(g: Tensor, x: Tensor) -> Tensor:
    """``Σ_k g[n, k, o] x[n, k, i]`` as ``[n, o, i]``."""
    size = g.shape[-1] * x.shape[-1] * g.element_size()
    if g.device.type == "cpu" and isinstance(size, int) and size >= LARGE:
        large: Tensor = _products(g, x)
        return large
    one_position = isinstance(g.shape[1], int) and g.shape[1] == 1
    return g.mT * x if one_position else g.mT @ x


@torch.library.custom_op("fxgrad::products", mutates_args=(), tags=ANY_LAYOUT)
def _products(g: Tensor, x: Tensor) -> Tensor:
    out = fresh(g, (g.shape[0], g.shape[2], x.shape[2]))
    if product_kernel.pays(g, x) and product_kernel.applies(g, x):
        product_kernel.rows(g, x, out)
        return out
    return torch.mul(g.mT, x, out=out) if g.shape[1] == 1 else torch.bmm(g.mT, x, out=out)


@_products.register_fake
def _(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[2], x.shape[2])


def conv_weight_grad(g: Tensor, patches: Patches) -> Tensor:
    """``[n, *weight.shape]`` from g ``[n, k, out, *space]`` and the windows of the input."""
    grad: Tensor = _conv_weight_grad(g, patches.input, patches.kernel, patches.settings.numbers())
    return grad


@torch.library.custom_op("fxgrad::conv_weight_grad", mutates_args=(), tags=ANY_LAYOUT)
def _conv_weight_grad(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> Tensor:
    out = fresh(g, (len(g), *kernel))
    weight_grads(g, input, kernel, Settings.of(numbers), out)
    return out


@_conv_weight_grad.register_fake
def _(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> Tensor:
    return g.new_empty(g.shape[0], *kernel)
