"""Weights of groups that rows are sent to: mixtures of experts."""

from __future__ import annotations

import torch.nn.functional as F

from fxgrad.kernels.grouped import grouped_rows
from fxgrad.rules.registry import rule
from fxgrad.terms import Term


@rule(grouped_rows, of=("weight",), batched=("input", "ids"))
def rows_of_groups(g, input, weight, ids):
    """y_k = x_k W[e_k]      dW_n[e] = Σ_{k: e_nk = e} x_nk ⊗ g_nk"""
    groups = weight.shape[0]
    sent = F.one_hot(ids.clamp(0, groups - 1), groups) * ((ids >= 0) & (ids < groups)).unsqueeze(-1)
    return {"weight": Term("nke,nki,nko->neio", sent.to(g.dtype), input, g)}
