"""The LSTM's loops with a kernel in C++ for all of a step but its product (lstm.cpp), where there is a compiler.

A step's small ops cost more than its product does: each is a call, runs in one thread, and PyTorch's tanh is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.memory import fresh
from fxgrad.kernels.onednn import plus_times
from fxgrad.kernels.recurrent.projection import Projection
from fxgrad.kernels.recurrent.walk import blocks, last, steps

PARALLEL = 1 << 13  # gates of a step from which a second thread gains more than it costs


KERNELS = Library("recurrent/lstm.cpp", dtypes=(torch.float32, torch.float64), computes="LSTMs")


def applies(*values: Tensor) -> bool:
    """Return whether the kernel can compute with these values."""
    return KERNELS.applies(*values)


def _step(name: str, cells: Tensor) -> tuple[Callable[..., Any], tuple[int, int, int]]:
    """Return the kernel of a step, and its last arguments: the batch, the hidden size and the number of threads."""
    kernel = getattr(KERNELS.functions, f"{name}_{str(cells.dtype).removeprefix('torch.')}")
    batch, hidden = cells.shape[1:]
    threads = torch.get_num_threads() if 4 * batch * hidden >= PARALLEL else 1
    return kernel, (batch, hidden, threads)


def _addresses(value: Tensor | None, length: int) -> list[int]:
    """Return where each step's rows of a contiguous value lie; zeros where there is none."""
    if value is None:
        return [0] * length
    start, size = value.data_ptr(), value.stride(0) * value.element_size()
    return [start + i * size for i in range(len(value))]


def forward(
    projection: Projection, gates: Tensor, hs: Tensor, cells: Tensor, w: Tensor, mask: Tensor | None, reverse: bool
) -> None:
    """Fills the gates i, f, n, o and the states, of which the first is given; what is projected stays in the cache."""
    step, sizes = _step("forward", cells)
    plus, h = plus_times(w, gates.shape[1]), hs.unbind(0)
    of_gates, of_c, of_h, of_mask = (_addresses(value, len(gates)) for value in (gates, cells, hs, mask))
    for block, walk in blocks(cells, len(gates), not reverse):
        projected = projection.of(block).unbind(0)
        for row, t, after in walk:
            before = t + reverse
            new = plus(projected[row], h[before])
            states = (of_c[before], of_c[after], of_h[before], of_h[after])
            step(new.data_ptr(), of_gates[t], *states, of_mask[t], *sizes)


def backward(
    dhs: Tensor, dc: Tensor | None, w: Tensor, gates: Tensor, cells: Tensor, mask: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the gates at all steps, before their activation, of h0 and of c0."""
    step, sizes = _step("backward", cells)
    gates, cells = gates.contiguous(), cells.contiguous()
    dxp, dh = fresh(dhs, gates.shape), last(dhs, reverse).contiguous()
    dcell = torch.zeros_like(cells[0]) if dc is None else dc.clone(memory_format=torch.contiguous_format)
    plus, d, dy = plus_times(w.t(), gates.shape[1]), dxp.unbind(0), dhs.unbind(0)
    of_gates, of_c, of_d, of_mask = (_addresses(value, len(d)) for value in (gates, cells, dxp, mask))
    for t, after, before in steps(len(d), not reverse):
        step(of_gates[t], of_c[before], of_c[after], dh.data_ptr(), dcell.data_ptr(), of_d[t], of_mask[t], *sizes)
        carried = dy[before] if mask is None else torch.addcmul(dy[before], 1 - mask[t], dh)
        dh = plus(carried, d[t])
    return dxp, dh, dcell
