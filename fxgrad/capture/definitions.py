"""Definitions in Python for ops that cannot be traced by those that PyTorch has in C++.

    take_along_dim          reads the integers of shapes: the trace would hold for one number of samples
    lstm_cell, gru_cell     on CUDA, call fused operators: of GRU's no shape is known, and fxgrad has a rule for neither

While fxgrad captures, such an op is made of other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.host.ops import defined_in_python


def take_along_dim(self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """``gather`` of both tensors, broadcast against each other along all dims but ``dim``."""
    if dim is None:
        return self.reshape(-1).gather(0, indices.reshape(-1))
    if self.dim() != indices.dim():
        raise RuntimeError(
            "torch.take_along_dim(): input and indices should have the same number of dimensions, but got "
            f"{self.dim()} dimensions for input, and {indices.dim()} dimensions for indices"
        )
    dim = dim % self.dim()
    around = (slice(dim), slice(dim + 1, None))
    before, after = (torch.broadcast_shapes(self.shape[part], indices.shape[part]) for part in around)
    source = self.expand(*before, self.shape[dim], *after)
    return source.gather(dim, indices.expand(*before, indices.shape[dim], *after))


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of a long short-term memory, in the order of PyTorch's sums: ``(h, c)``, each ``[B, H]``."""
    h, c = hx
    gates = F.linear(h, w_hh, b_hh) + F.linear(input, w_ih, b_ih)
    enter, forget, cell, out = gates.chunk(4, 1)
    c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
    return out.sigmoid() * c.tanh(), c


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """One step of a gated recurrent unit, in the order of PyTorch's sums: ``[B, H]``."""
    reset, update, new = F.linear(input, w_ih, b_ih).chunk(3, 1)
    h_reset, h_update, h_new = F.linear(hx, w_hh, b_hh).chunk(3, 1)
    reset = (h_reset + reset).sigmoid()
    update = (h_update + update).sigmoid()
    new = (new + h_new * reset).tanh()
    return (hx - new) * update + new


_DEFINITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.take_along_dim.default: take_along_dim,
    torch.ops.aten.lstm_cell.default: lstm_cell,
    torch.ops.aten.gru_cell.default: gru_cell,
}


def traceable_definitions() -> AbstractContextManager[None]:
    """Put the definitions above in the place of PyTorch's, for whatever is traced meanwhile."""
    return defined_in_python(_DEFINITIONS)
