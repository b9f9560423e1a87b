"""The LSTM's loops in C++ (lstm.cpp), where there is a compiler.

A step's ops cost more than its product does: each is a call, most run in one thread, and PyTorch's tanh is slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.memory import fresh
from fxgrad.kernels.recurrent.projection import Projection
from fxgrad.kernels.recurrent.walk import blocks, last

LONGEST = 16  # numbers in a vector, at most: what the weights of a gate are filled up to

SOURCES = ("common.cpp", "recurrent/units.cpp", "recurrent/lstm.cpp")
KERNELS = Library(*SOURCES, dtypes=(torch.float32, torch.float64), computes="LSTMs")


def applies(*values: Tensor) -> bool:
    """Return whether the kernel can compute with these values."""
    return KERNELS.applies(*values)


def forward(
    projection: Projection, gates: Tensor, hs: Tensor, cells: Tensor, w: Tensor, mask: Tensor | None, reverse: bool
) -> None:
    """Fills the gates i, f, n, o and the states, of which the first is given; what is projected stays in the cache."""
    threads = torch.get_num_threads()
    weights = _laid_out(w, gates, False, threads)
    for times, steps in blocks(cells, len(gates), not reverse):
        projected = projection.of(times).contiguous()
        going_on = None if mask is None else mask[times]
        of_block = (gates[times], cells[times.start :], hs[times.start :], going_on)
        _call("forward", projected, weights, *of_block, len(steps), int(reverse), *cells.shape[1:], threads=threads)


def backward(
    dhs: Tensor, dc: Tensor | None, w: Tensor, gates: Tensor, cells: Tensor, mask: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the gates at all steps, before their activation, of h0 and of c0."""
    dhs, gates, cells = dhs.contiguous(), gates.contiguous(), cells.contiguous()
    d, dh = fresh(dhs, gates.shape), last(dhs, reverse).clone()
    dcell = torch.zeros_like(cells[0]) if dc is None else dc.clone(memory_format=torch.contiguous_format)
    threads = torch.get_num_threads()
    sizes = (len(gates), int(reverse), *cells.shape[1:])
    weights = _laid_out(w, gates, True, threads)
    _call("backward", dhs, weights, gates, cells, mask, d, dh, dcell, *sizes, threads=threads)
    return d, dh, dcell


def _laid_out(w: Tensor, gates: Tensor, back: bool, threads: int) -> Tensor:
    """Return W_hh as the products of a direction read it, which depends on how many threads they take."""
    hidden = w.shape[1]
    laid_out = w.new_zeros(4 * hidden * -(-hidden // LONGEST) * LONGEST)
    _call("lay_out", w.contiguous(), laid_out, int(back), gates.shape[1], hidden, threads=threads)
    return laid_out


def _call(name: str, first: Tensor, *others: Tensor | int | None, threads: int) -> None:
    KERNELS.call(f"{name}_{str(first.dtype).removeprefix('torch.')}", first, *others, threads=threads)
