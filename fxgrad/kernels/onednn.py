"""Large float32 products on CPU, by oneDNN.

PyTorch gives matrix products to MKL, convolutions and recurrent layers to oneDNN. On an AMD processor with AVX-512
oneDNN takes a third to two thirds of MKL's time, on an Intel one a little more (docs/performance.md): where it was
measured to be slower (`fxgrad.costs.machines`), and where it does not apply, these are PyTorch's own products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.kernels.memory import fresh

FEW = 2 << 20  # products below which calling another library gains nothing
WIDE, PART = 1 << 14, 1 << 11  # outputs, such as a vocabulary, from which some at a time are faster than all at once
MANY = 1 << 10  # rows from which copying them transposed costs more than it gains


def applies(value: Tensor) -> bool:
    """Return whether oneDNN may compute with this value."""
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(onednn and value.device.type == "cpu" and value.dtype is torch.float32 and value.numel())


def rows_times(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` as F.linear computes it, outside of autograd."""
    if applies(x):
        b = None if bias is None else bias.contiguous()  # oneDNN would read what lies behind its first number
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), w.contiguous(), b, "none", [], "")
        return out
    return F.linear(x, w, bias)


def plus_times(w: Tensor, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """``(y, x) -> y + x Wᵀ`` outside of autograd, for many x with so many rows each: W is laid out for it once."""
    if not applies(w) or rows * w.numel() < FEW:
        columns = w.t().contiguous()
        return lambda y, x: torch.addmm(y, x, columns)
    packed, linear = torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), rows), torch.ops.mkldnn._linear_pointwise
    return lambda y, x: linear.default(x, packed, None, "none", [], "").add_(y)


def copies_transposed(m: int, o: int, i: int) -> bool:
    """Return whether `outer_products` of so many rows copies g transposed, which may as well weight it."""
    return o <= WIDE and (o < i or m < MANY)


def outer_products(g: Tensor, x: Tensor, c: Tensor | None = None, onednn: bool = True) -> Tensor:
    """``Σ_m c[m] g[m, o] x[m, i]`` as ``[o, i]``: what a linear layer's weight gradient is."""
    (m, o), i = g.shape, x.shape[1]
    if not onednn or not applies(g) or not applies(x) or m * o * i < FEW:
        if c is None:
            return g.t() @ x
        return (g.t() * c) @ x if o <= i else g.t() @ (x * c.unsqueeze(1))
    if o > WIDE:
        x = x if c is None else x * c.unsqueeze(1)
        result = fresh(g, (o, i))
        for start in range(0, o, PART):
            result[start : start + PART] = outer_products(g[:, start : start + PART], x)
        return result
    if copies_transposed(m, o, i):
        columns = g.new_empty(o, m)
        torch.mul(g.t(), 1 if c is None else c, out=columns)
        x = x.contiguous() if _overlaps(x) else x
        out: Tensor = torch.ops.mkldnn._linear_pointwise(columns, x.t(), None, "none", [], "")
        return out
    # As the gradient of a 1 x 1 convolution over m pixels: it reads both as they lie in memory.
    x = x.contiguous() if c is None else x * c.unsqueeze(1)
    pixels = [side.view(1, m, 1, -1).permute(0, 3, 1, 2) for side in (g.contiguous(), x)]
    weight = g.new_empty(()).expand(o, i, 1, 1)
    settings = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    out = torch.ops.aten.convolution_backward(*pixels, weight, None, *settings, (False, True, False))[1]
    return out.reshape(o, i)


def _overlaps(x: Tensor) -> bool:
    """Return whether rows begin within each other, as in ``unfold``: oneDNN raises an error then."""
    (rows, columns), (outer, inner) = x.shape, x.stride()
    return (outer < inner * columns) if outer >= inner else (inner < outer * rows)
