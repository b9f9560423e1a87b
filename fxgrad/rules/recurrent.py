"""The recurrence: its own backward also says what its weights' terms are made of."""

from __future__ import annotations

import torch

from fxgrad.recurrent.recurrence import hidden_gradients, states_before
from fxgrad.rules.registry import own_backward
from fxgrad.terms import Term


@own_backward("fxgrad::recurrence", of=("w_hh", "b_hh", "w_hr"), rows="xp", outputs=2)
def recurrence(grads, outputs, samples_first, mode, lengths, h0, c0, w_hh, w_hr, reverse):
    """h_t = R cell(x_t, W h_{t-1} + b)

    dW_n = Σ_t g_nt ⊗ h_n,t-1      db_n = Σ_t g_nt      dR_n = Σ_t dh_nt ⊗ y_nt      g: the gradient of W h + b
    """
    (dhs, dc), (hs, _, *saved) = grads, outputs
    dhs = torch.zeros_like(hs) if dhs is None else dhs
    dxp, dh0, dc0, fourth = torch.ops.fxgrad.recurrence_backward(
        mode, dhs, dc, lengths, w_hh, w_hr, hs, *saved, reverse
    )
    g = samples_first(hidden_gradients(mode, dxp, fourth))
    terms = {
        "w_hh": Term("n...o,n...i->noi", g, samples_first(states_before(hs, reverse))),
        "b_hh": Term("n...o->no", g),
    }
    if w_hr is not None:
        terms["w_hr"] = Term("n...o,n...i->noi", samples_first(fourth), samples_first(saved[-1]))
    by_c = None if c0 is None else dc0.to(c0.dtype)
    return {"xp": dxp, "h0": dh0.to(h0.dtype), "c0": by_c}, terms
