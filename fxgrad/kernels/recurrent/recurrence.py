"""The recurrence of one recurrent layer in one direction: an operator with its own backward.

The loop over time runs inside the operator, so the compiled graph is the same for every length and compiling
takes no longer for a long one. The input projection is computed for many steps together, before the loop makes
the gates of it, mostly in the same memory (for an RNN, the states). The backward returns the gradients of the
gates at all steps: with them each weight has one per-sample term with k = time, contracted after the loop. What
does not depend on the step before is computed for all steps together; the loop itself holds one product and a
few in-place ops.

    p = W_ih x + b_ih                   the input projection
    RNN    h' = act(p + W h + b)
    LSTM   i, f, n, o = p + W h + b;   c' = σ(f) c + σ(i) tanh(n);   h' = R (σ(o) tanh(c'))
    GRU    r, z = σ(p_rz + W_rz h + b_rz);   n = tanh(p_n + r (W_n h + b_n));   h' = n + z (h - n)

A sample with ``lengths[b] = t`` stops after t steps: its state then stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxgrad.host.dispatch import autocast_key, autocast_keys, without_keys
from fxgrad.kernels.memory import fresh
from fxgrad.kernels.onednn import plus_times
from fxgrad.kernels.operators import operator
from fxgrad.kernels.recurrent import lstm, lstm_kernel
from fxgrad.kernels.recurrent.projection import Projection, input_gradient
from fxgrad.kernels.recurrent.walk import blocks, last, states_after, states_before, steps

GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}


def _fake(mode: str, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, _, w_ih, _, w_hh, _, w_hr, _ = others
    length, batch, cell = x.shape[0], x.shape[1], (x.shape[1], w_hh.shape[0] // GATES[mode])
    is_lstm = mode == "LSTM"
    if is_lstm and w_hr is None:
        lstm_kernel.KERNELS.start(x)
    return (
        x.new_empty(length + 1, batch, w_hh.shape[1]),
        x.new_empty(cell if is_lstm else 0),
        x.new_empty((length, batch, w_ih.shape[0]) if is_lstm or mode == "GRU" else 0),
        x.new_empty((length + 1, *cell) if is_lstm else 0),
        x.new_empty((length, *cell) if mode == "GRU" or w_hr is not None else 0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mode, x, lengths, h0, c0, w_ih, _, w_hh, _, w_hr, ctx.reverse = inputs
    ctx.dtypes = (h0.dtype, None if c0 is None else c0.dtype)
    hs, _, *saved = output
    ctx.save_for_backward(x, lengths, w_ih, w_hh, w_hr, hs, *saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dhs: Tensor | None, dc: Tensor | None, *others: None) -> Any:
    """Return the plain gradients, summed over the batch: where no tap stands behind the op."""
    x, lengths, w_ih, w_hh, w_hr, *saved = ctx.saved_tensors
    hs, gates, cells, extra = saved
    dhs = torch.zeros_like(hs) if dhs is None else dhs
    dxp, dh0, dc0, fourth = recurrence_backward(
        ctx.mode, dhs, dc, lengths, w_hh, w_hr, hs, gates, cells, extra, ctx.reverse
    )
    g = hidden_gradients(ctx.mode, dxp, fourth)
    by_x, _, by_h, by_c, by_w_ih, by_b_ih, by_w_hh, by_b_hh, by_w_hr, _ = ctx.needs_input_grad[1:]
    return (
        None,
        input_gradient(dxp, w_ih.to(dxp.dtype)) if by_x else None,
        None,
        dh0.to(ctx.dtypes[0]) if by_h else None,
        dc0.to(ctx.dtypes[1]) if by_c else None,
        _summed(dxp, x).to(w_ih.dtype) if by_w_ih else None,
        dxp.sum((0, 1)).to(w_ih.dtype) if by_b_ih else None,
        _summed(g, states_before(hs, ctx.reverse)).to(w_hh.dtype) if by_w_hh else None,
        g.sum((0, 1)).to(w_hh.dtype) if by_b_hh else None,
        _summed(fourth, extra).to(w_hh.dtype) if by_w_hr else None,
        None,
    )


def _summed(g: Tensor, x: Tensor) -> Tensor:
    return g.flatten(0, 1).t() @ x.flatten(0, 1)


@operator(_fake, keep=_keep, backward=_backward)
def recurrence(
    mode: str,
    x: Tensor,
    lengths: Tensor | None,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    b_ih: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``x [T, B, in] -> hs [T + 1, B, P]``, the last cell state ``[B, H]``, and what the backward reads.

    ``mode`` is nn.RNNBase's. The states hs hold h0 first (last where ``reverse``). All is computed in x's dtype.
    """
    length, batch = x.shape[:2]
    w_ih, w_hh = w_ih.to(x.dtype), w_hh.to(x.dtype)
    b_ih, b_hh, w_hr = (None if w is None else w.to(x.dtype) for w in (b_ih, b_hh, w_hr))
    hs = fresh(x, (length + 1, *h0.shape))
    c, gates, cells, extra = (x.new_empty(0) for _ in range(4))
    hs[-1 if reverse else 0] = h0
    mask = None if lengths is None else _going_on(x, lengths)
    bias = b_ih if mode == "GRU" or b_ih is None or b_hh is None else b_ih + b_hh  # a GRU multiplies b_hh by r
    projection = Projection(x, w_ih, bias)
    if mode == "LSTM":
        assert c0 is not None
        gates = fresh(x, (length, batch, len(w_ih)))
        cells = fresh(x, (length + 1, *c0.shape))
        cells[-1 if reverse else 0] = c0
        extra = lstm.forward(projection, gates, hs, cells, w_hh, w_hr, mask, reverse)
        c = cells[0 if reverse else -1].clone()
    elif mode == "GRU":
        gates = projection.into(fresh(x, (length, batch, len(w_ih))))
        extra = _gru(gates, hs, w_hh, b_hh, mask, reverse)
    else:
        projection.into(states_after(hs, reverse))
        _rnn(hs, w_hh.t().contiguous(), mode == "RNN_RELU", mask, reverse)
    return hs, c, gates, cells, extra


def _going_on(x: Tensor, lengths: Tensor) -> Tensor:
    """``[T, B, 1]``: 1 while a sample goes on, 0 after its end."""
    time = torch.arange(x.shape[0], device=x.device)
    return (time[:, None] < lengths.to(x.device)).to(x.dtype).unsqueeze(-1)


def _rnn(hs: Tensor, w: Tensor, relu: bool, mask: Tensor | None, reverse: bool) -> None:
    """Turns the states after each step from projections of the input into states."""
    h = hs.unbind(0)
    activate = torch.relu_ if relu else torch.tanh_
    for t, before, after in steps(len(h) - 1, reverse):
        new = activate(h[after].addmm_(h[before], w))
        if mask is not None:
            new.copy_(torch.lerp(h[before], new, mask[t]))


def _gru(gates: Tensor, hs: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor | None, reverse: bool) -> Tensor:
    """Turns ``gates`` from projections of the input into r, z, n; returns W_n h + b_n."""
    hidden = hs.shape[-1]
    inner = fresh(gates, (len(gates), *hs.shape[1:]))
    plus, bias = plus_times(w, hs.shape[1]), gates.new_zeros(1) if bias is None else bias
    h, g = hs.unbind(0), inner.unbind(0)
    rz = gates[..., : 2 * hidden].unbind(0)
    r, z, n = (part.unbind(0) for part in gates.chunk(3, -1))
    for t, before, after in steps(len(n), reverse):
        product = plus(bias, h[before])
        g[t].copy_(product[:, 2 * hidden :])
        rz[t].add_(product[:, : 2 * hidden]).sigmoid_()
        n[t].addcmul_(r[t], g[t]).tanh_()
        new = torch.lerp(n[t], h[before], z[t], out=h[after])
        if mask is not None:
            new.copy_(torch.lerp(h[before], new, mask[t]))
    return inner


def _fake_backward(mode: str, dhs: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, w_hh, w_hr, hs, *_ = others
    length, batch, states = hs.shape[0] - 1, hs.shape[1], hs.shape[2]
    dxp = dhs.new_empty(length, batch, w_hh.shape[0])
    dc0 = dhs.new_empty((batch, w_hh.shape[0] // 4) if mode == "LSTM" else 0)
    fourth = dhs.new_empty(dxp.shape if mode == "GRU" else 0 if w_hr is None else (length, batch, states))
    return dxp, dhs.new_empty(batch, states), dc0, fourth


@operator(_fake_backward)
def recurrence_backward(
    mode: str,
    dhs: Tensor,
    dc: Tensor | None,
    lengths: Tensor | None,
    w_hh: Tensor,
    w_hr: Tensor | None,
    hs: Tensor,
    gates: Tensor,
    cells: Tensor,
    extra: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the input projection, h0 and c0, and a fourth for a weight's term (see `hidden_gradients`)."""
    w, dtype = w_hh.to(dhs.dtype), dhs.dtype
    mask = None if lengths is None else _going_on(hs[1:], lengths)
    if mode == "LSTM":
        w_hr = None if w_hr is None else w_hr.to(dtype)
        return lstm.backward(dhs, dc, w, w_hr, gates, cells, mask, reverse)
    if mode == "GRU":
        return _gru_backward(dhs, w, hs, gates, extra, mask, reverse)
    return _rnn_backward(dhs, w, states_after(hs, reverse), mode == "RNN_RELU", mask, reverse)


def hidden_gradients(mode: str, dxp: Tensor, fourth: Tensor) -> Tensor:
    """The gradients of ``W_hh h + b_hh`` at every step: the projection's, but for the GRU's n, where r is between."""
    return fourth if mode == "GRU" else dxp


def _rnn_backward(
    dhs: Tensor, w: Tensor, after: Tensor, relu: bool, mask: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dxp = fresh(dhs, after.shape)
    plus, d, dy = plus_times(w.t(), dhs.shape[1]), dxp.unbind(0), dhs.unbind(0)
    dh = last(dhs, reverse)
    for times, block in blocks(after, len(d), reverse):
        slope = (after[times] > 0).to(dhs.dtype) if relu else 1 - after[times] * after[times]
        going_on = None if mask is None else mask[times]
        slope = slope if going_on is None else slope * going_on
        for row, t, before in block:
            torch.mul(slope[row], dh, out=d[t])
            carried = dy[before] if going_on is None else torch.addcmul(dy[before], 1 - going_on[row], dh)
            dh = plus(carried, d[t])
    return dxp, dh.clone(), dhs.new_empty(0), dhs.new_empty(0)


def _gru_backward(
    dhs: Tensor, w: Tensor, hs: Tensor, gates: Tensor, inner: Tensor, mask: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states = states_before(hs, reverse)
    length, batch, hidden = states.shape
    dgh, dxp = fresh(dhs, (length, batch, 3 * hidden)), fresh(dhs, (length, batch, 3 * hidden))
    factors, by_h = dgh.view(length, batch, 3, hidden), dxp[..., 2 * hidden :]
    d, d3, d_n, dy = (each.unbind(0) for each in (dgh, factors, by_h, dhs))
    plus, dh = plus_times(w.t(), batch), last(dhs, reverse)
    for times, block in blocks(hs, length, reverse):
        # d(W h + b) = factor * dh, gate by gate: the factors of a block stand where its gradients will
        r, z, n = gates[times].chunk(3, -1)
        by_r, by_z, by_n = factors[times].unbind(2)
        inside = torch.mul(1 - z, 1 - n * n, out=by_h[times])  # of n's tanh
        torch.mul(z * (1 - z), states[times] - n, out=by_z)
        if mask is not None:
            going_on = mask[times]
            inside.mul_(going_on)
            by_z.mul_(going_on)
            z = z * going_on + (1 - going_on)
        torch.mul(inside, r, out=by_n)
        torch.mul(by_n, inner[times] * (1 - r), out=by_r)
        for row, t, before in block:
            d3[t].mul_(dh.unsqueeze(1))
            d_n[t].mul_(dh)
            dh = plus(torch.addcmul(dy[before], z[row], dh), d[t])
        dxp[times, :, : 2 * hidden] = dgh[times, :, : 2 * hidden]
    return dxp, dh.clone(), dhs.new_empty(0), dgh


def _autocast(device_type: str) -> None:
    """The op under autocast, which records the cast of x; the others follow x's dtype."""
    below = autocast_keys(device_type)

    def cast(mode: str, x: Tensor, *others: Any) -> Any:
        lowered = x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == device_type
        x = x.to(torch.get_autocast_dtype(device_type)) if lowered else x
        with without_keys(below):
            return torch.ops.fxgrad.recurrence.default(mode, x, *others)

    _LIBRARY.impl("recurrence", cast, autocast_key(device_type))


_LIBRARY = torch.library.Library("fxgrad", "FRAGMENT")
_autocast("cpu")
_autocast("cuda")
