"""Per-sample gradients themselves, of products, convolutions and tables: large ones into memory that is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.kernels import product_kernel, window_kernel
from fxgrad.kernels.convolutions import weight_grads
from fxgrad.kernels.factors import OneHot, Patches
from fxgrad.kernels.memory import fresh
from fxgrad.kernels.operators import ANY_LAYOUT, operator
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.tables import kernels_pay, table_grads, without

LARGE = 64 << 10  # bytes of one sample's gradient from which memory decides the time on CPU


def products(g: Tensor, x: Tensor) -> Tensor:
    """``Σ_k g[n, k, o] x[n, k, i]`` as ``[n, o, i]``."""
    if _large(g, g.shape[-1] * x.shape[-1]):
        return _products(g, x)
    one_position = isinstance(g.shape[1], int) and g.shape[1] == 1
    return g.mT * x if one_position else g.mT @ x


def _fake_products(g: Tensor, x: Tensor) -> Tensor:
    product_kernel.KERNELS.start(g)
    return g.new_empty(g.shape[0], g.shape[2], x.shape[2])


@operator(_fake_products, ANY_LAYOUT)
def _products(g: Tensor, x: Tensor) -> Tensor:
    out = fresh(g, (g.shape[0], g.shape[2], x.shape[2]))
    if not product_kernel.applies(g, x) or not (g.shape[1] == 1 or product_kernel.pays(g, x)):
        return torch.mul(g.mT, x, out=out) if g.shape[1] == 1 else torch.bmm(g.mT, x, out=out)
    if g.shape[1] == 1:
        product_kernel.outer(g.squeeze(1), x.squeeze(1), out)
    else:
        product_kernel.rows(g, x, out)
    return out


def scattered(rows: OneHot, g: Tensor) -> Tensor:
    """``Σ_k onehot(ids_nk) ⊗ g_nk`` of g ``[n, k.., d..]``, as ``[n, classes, d]``."""
    n = rows.ids.shape[0]
    ids = rows.ids.reshape(n, -1)
    g = g.reshape(n, ids.shape[1], math.prod(g.shape[rows.ids.dim() :]))
    if kernels_pay(g) or _large(g, rows.classes * g.shape[2]):
        return table_grads(ids, g, rows.classes, rows.padding)
    g = without(rows.padding, ids, g)
    zeros = g.new_zeros(n, rows.classes, g.shape[2])
    return zeros.scatter_add(1, ids.unsqueeze(-1).expand_as(g), g)


def scattered_onto(total: Tensor, rows: OneHot, g: Tensor) -> Tensor:
    """``total`` and the gradient of a table, from ids ``[n, k]`` and g ``[n, k, d]``; compiled, in its place."""
    g = without(rows.padding, rows.ids, g)
    return total.scatter_add(1, rows.ids.unsqueeze(-1).expand_as(g), g)


def _large(g: Tensor, elements: object) -> bool:
    return g.device.type == "cpu" and isinstance(elements, int) and elements * g.element_size() >= LARGE


def conv_weight_grad(g: Tensor, patches: Patches) -> Tensor:
    """``[n, *weight.shape]`` from g ``[n, k, out, *space]`` and the windows of the input."""
    return _conv_weight_grad(g, patches.input, patches.kernel, patches.settings.numbers())


def _fake_conv_weight_grad(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> Tensor:
    window_kernel.KERNELS.start(g)
    return g.new_empty(g.shape[0], *kernel)


@operator(_fake_conv_weight_grad, ANY_LAYOUT)
def _conv_weight_grad(g: Tensor, input: Tensor, kernel: Sequence[int], numbers: Sequence[int]) -> Tensor:
    out = fresh(g, (len(g), *kernel))
    weight_grads(g, input, kernel, Settings.of(numbers), out)
    return out
