"""Rows of a table that is a parameter."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F

from fxgrad.rules.registry import rule
from fxgrad.terms import OneHot, Term


@rule(
    F.embedding,
    of=("weight",),
    batched=("input",),
    refuse={
        "max_norm": "it renormalises the weight in the forward, for all samples at once",
        "scale_grad_by_freq": "it counts an id over the whole batch, so samples influence each other",
    },
    ignore={"norm_type": "it is max_norm's", "sparse": "grad_sample is dense"},
)
def embedding(g, input, weight, padding_idx=None):
    """y = W[ids]        dW_n[v] = Σ_{k: ids_nk = v} g_nk"""
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return {"weight": Term("n...v,n...d->nvd", OneHot(input, weight.shape[0], padding_idx), g)}


@rule(operator.getitem, of=("input",), shared=True)
def getitem(g, input, index, use):
    """y = W[ids]        dW_n[v] = Σ_{k: ids_nk = v} g_nk,   and for slices: g where they were cut"""
    if use.output is not None:
        ids = index[0] if isinstance(index, tuple) else index
        ids = ids.remainder(input.shape[0])
        return {"input": Term("n...v,n...d->nvd", OneHot(ids, input.shape[0]), g, shape=input.shape)}
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, list) for item in index):  # may name a place twice
        places = torch.arange(input.numel(), device=g.device).view(input.shape)[index].flatten()
        grad = g.new_zeros(g.shape[0], input.numel()).index_add(1, places, g.flatten(1))
        return {"input": grad.view(g.shape[0], *input.shape)}
    grad = g.new_zeros(g.shape[0], *input.shape)
    grad[(slice(None), *index)] = g
    return {"input": grad}
