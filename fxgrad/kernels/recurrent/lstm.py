"""The LSTM's loops over time, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.kernels.memory import fresh
from fxgrad.kernels.recurrent import lstm_kernel
from fxgrad.kernels.recurrent.projection import Projection
from fxgrad.kernels.recurrent.walk import blocks, last, states_after, states_before, steps


def forward(
    projection: Projection,
    gates: Tensor,
    hs: Tensor,
    cells: Tensor,
    w_hh: Tensor,
    w_hr: Tensor | None,
    mask: Tensor | None,
    reverse: bool,
) -> Tensor:
    """Fills the gates i, f, n, o and the states; returns o tanh(c) before the projection R."""
    if w_hr is None and lstm_kernel.applies(gates):
        lstm_kernel.forward(projection, gates, hs, cells, w_hh, mask, reverse)
        return gates.new_empty(0)
    projection.into(gates)
    hidden, w = cells.shape[-1], w_hh.t().contiguous()
    h, c, all_gates = hs.unbind(0), cells.unbind(0), gates.unbind(0)
    i_and_f = gates[..., : 2 * hidden].unbind(0)
    i, f, n, o = (part.unbind(0) for part in gates.chunk(4, -1))
    outputs = gates.new_empty(0) if w_hr is None else fresh(gates, (len(i), *cells.shape[1:]))
    out = outputs.unbind(0)
    for t, before, after in steps(len(i), reverse):
        all_gates[t].addmm_(h[before], w)
        i_and_f[t].sigmoid_()
        n[t].tanh_()
        o[t].sigmoid_()
        cell = torch.mul(f[t], c[before], out=c[after]).addcmul_(i[t], n[t])
        if mask is not None:
            cell.copy_(torch.lerp(c[before], cell, mask[t]))
        if w_hr is None:
            new = torch.tanh(cell, out=h[after]).mul_(o[t])
        else:
            new = torch.mm(torch.tanh(cell, out=out[t]).mul_(o[t]), w_hr.t(), out=h[after])
        if mask is not None:
            new.copy_(torch.lerp(h[before], new, mask[t]))
    return outputs


def backward(
    dhs: Tensor,
    dc: Tensor | None,
    w: Tensor,
    w_hr: Tensor | None,
    gates: Tensor,
    cells: Tensor,
    mask: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the input projection, h0, c0, and of the states before R."""
    if w_hr is None and lstm_kernel.applies(gates, dhs):
        return *lstm_kernel.backward(dhs, dc, w, gates, cells, mask, reverse), dhs.new_empty(0)
    cells_before, cells_after = states_before(cells, reverse), states_after(cells, reverse)
    length, batch, hidden = cells_after.shape
    dxp = fresh(dhs, (length, batch, 4 * hidden))
    d, dy = dxp.unbind(0), dhs.unbind(0)
    d_ifn, d_o = dxp.view(length, batch, 4, hidden)[:, :, :3].unbind(0), dxp[..., 3 * hidden :].unbind(0)
    projected = dhs.new_empty(0) if w_hr is None else fresh(dhs, (length, *dhs.shape[1:]))
    dh = last(dhs, reverse)
    dcell = dhs.new_zeros(batch, hidden) if dc is None else dc.clone()
    for times, block in blocks(cells, length, reverse):
        going_on = None if mask is None else mask[times]
        by_cell, by_output, to_cell, kept = _factors(gates[times], cells_before[times], cells_after[times], going_on)
        for row, t, before in block:
            output = dh
            if w_hr is not None:
                projected[t] = dh if going_on is None else dh * going_on[row]
                output = dh @ w_hr
            dcell.addcmul_(output, to_cell[row])
            torch.mul(by_cell[row], dcell.unsqueeze(1), out=d_ifn[t])
            torch.mul(by_output[row], output, out=d_o[t])
            dcell.mul_(kept[row])
            carried = dy[before] if going_on is None else torch.addcmul(dy[before], 1 - going_on[row], dh)
            dh = torch.addmm(carried, d[t], w)
    return dxp, dh.clone(), dcell, projected


def _factors(
    gates: Tensor, before: Tensor, after: Tensor, going_on: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of some steps, from gates and cells, the factors of dh and dc.

    d(pre-activations of i, f, n) = dc * by_cell,   d(pre-activation of o) = dh * by_output;
    dc gets dh * to_cell, and the step before gets dc * kept.
    """
    i, f, n, o = gates.chunk(4, -1)
    tanh = after.tanh()
    by_cell = torch.stack([n * i * (1 - i), before * f * (1 - f), i * (1 - n * n)], 2)
    by_output, to_cell = tanh * o * (1 - o), o * (1 - tanh * tanh)
    if going_on is None:
        return by_cell, by_output, to_cell, f
    kept = f * going_on + (1 - going_on)
    return by_cell * going_on.unsqueeze(2), by_output * going_on, to_cell * going_on, kept
