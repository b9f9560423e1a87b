"""The recurrence: its own backward also says what its weights' terms are made of."""

from __future__ import annotations

import torch

from fxgrad.kernels.recurrent.projection import input_gradient
from fxgrad.kernels.recurrent.recurrence import hidden_gradients
from fxgrad.kernels.recurrent.walk import states_before
from fxgrad.rules.registry import own_backward
from fxgrad.terms import Term


@own_backward("fxgrad::recurrence", of=("w_ih", "b_ih", "w_hh", "b_hh", "w_hr"), rows="x", outputs=2)
def recurrence(grads, outputs, samples_first, mode, x, lengths, h0, c0, w_ih, w_hh, w_hr, reverse):
    """h_t = R cell(V x_t + a, W h_{t-1} + b)      f, g: the gradients of V x + a and of W h + b

    dV_n = Σ_t f_nt ⊗ x_nt      dW_n = Σ_t g_nt ⊗ h_n,t-1      dR_n = Σ_t dh_nt ⊗ y_nt      dx_nt = f_nt V
    da_n = Σ_t f_nt             db_n = Σ_t g_nt
    """
    (dhs, dc), (hs, _, *saved) = grads, outputs
    dhs = torch.zeros_like(hs) if dhs is None else dhs
    dxp, dh0, dc0, fourth = torch.ops.fxgrad.recurrence_backward(
        mode, dhs, dc, lengths, w_hh, w_hr, hs, *saved, reverse
    )
    f, g = samples_first(dxp), samples_first(hidden_gradients(mode, dxp, fourth))
    terms = {
        "w_ih": Term("n...o,n...i->noi", f, samples_first(x).to(f.dtype)),
        "b_ih": Term("n...o->no", f),
        "w_hh": Term("n...o,n...i->noi", g, samples_first(states_before(hs, reverse))),
        "b_hh": Term("n...o->no", g),
    }
    if w_hr is not None:
        terms["w_hr"] = Term("n...o,n...i->noi", samples_first(fourth), samples_first(saved[-1]))
    inputs = {
        "x": lambda: input_gradient(dxp, w_ih.to(dxp.dtype)).to(x.dtype),
        "h0": lambda: dh0.to(h0.dtype),
        "c0": lambda: dc0.to(c0.dtype),
    }
    return inputs, terms
