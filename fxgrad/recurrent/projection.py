"""The product of many rows with one matrix, and its gradient, at the speed of PyTorch's own recurrent layers.

nn.LSTM runs on oneDNN on CPU, PyTorch's float32 matrix products on MKL. On the processor of docs/performance.md (AMD
with AVX-512) oneDNN takes a third to a half of MKL's time. Everywhere else these are F.linear.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rows_times(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` as F.linear computes it, outside of autograd."""
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if onednn and x.device.type == "cpu" and x.dtype is torch.float32 and x.numel():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), w.contiguous(), bias, "none", [], "")
        return out
    return F.linear(x, w, bias)


@torch.library.custom_op("fxgrad::input_gradient", mutates_args=())
def input_gradient(g: Tensor, w: Tensor) -> Tensor:
    """``g W``: the gradient of x in ``W x``; an operator, because Inductor gives a product that it sees to MKL."""
    return rows_times(g, w.t())


@input_gradient.register_fake
def _(g: Tensor, w: Tensor) -> Tensor:
    return g.new_empty(*g.shape[:-1], w.shape[1])
