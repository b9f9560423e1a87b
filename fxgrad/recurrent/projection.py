"""The gradient of a recurrent layer's input, at the speed of PyTorch's own recurrent layers, which run on oneDNN."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.operators.onednn import rows_times


@torch.library.custom_op("fxgrad::input_gradient", mutates_args=())
def input_gradient(g: Tensor, w: Tensor) -> Tensor:
    """``g W``: the gradient of x in ``W x``; an operator, because Inductor gives a product that it sees to MKL."""
    return rows_times(g, w.t())


@input_gradient.register_fake
def _(g: Tensor, w: Tensor) -> Tensor:
    return g.new_empty(*g.shape[:-1], w.shape[1])
