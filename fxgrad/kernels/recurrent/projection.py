"""The projection of a recurrent layer's input and its gradient, on oneDNN as in PyTorch's own recurrent layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fxgrad.kernels.onednn import rows_times
from fxgrad.kernels.operators import operator
from fxgrad.kernels.recurrent.walk import BLOCK


class Projection(NamedTuple):
    """``W x + b`` at all steps, made a block of steps at a time."""

    x: Tensor
    w: Tensor
    b: Tensor | None

    def of(self, times: slice) -> Tensor:
        """That of these steps."""
        return rows_times(self.x[times], self.w, self.b)

    def into(self, out: Tensor) -> Tensor:
        """That of all steps, written into ``out``."""
        size = max(1, 4 * BLOCK // max(1, out[0].numel() * out.element_size()))
        for i in range(0, len(out), size):
            out[i : i + size] = self.of(slice(i, i + size))
        return out


@operator(lambda g, w: g.new_empty(*g.shape[:-1], w.shape[1]))
def input_gradient(g: Tensor, w: Tensor) -> Tensor:
    """``g W``: the gradient of x in ``W x``; an operator, because Inductor gives a product that it sees to MKL."""
    return rows_times(g, w.t())
