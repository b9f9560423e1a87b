"""Rows of a table that is a parameter."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F

from fxgrad.kernels.precision import computable
from fxgrad.rules.registry import rule
from fxgrad.rules.uses import Slot, slots_of
from fxgrad.samples.layouts import Layout
from fxgrad.terms import OneHot, Term, is_one

OVER_THE_BATCH = {
    "max_norm": "it renormalises the weight in the forward, for all samples at once",
    "scale_grad_by_freq": "it counts an id over the whole batch, so samples influence each other",
}
WITHOUT_INFLUENCE = {"norm_type": "it is max_norm's", "sparse": "grad_sample is dense"}


@rule(
    F.embedding,
    of=("weight",), batched=("input",), refuse=OVER_THE_BATCH, ignore=WITHOUT_INFLUENCE,
)  # fmt: skip
def embedding(g, input, weight, padding_idx=None):
    """y = W[ids]        dW_n[v] = Σ_{k: ids_nk = v} g_nk"""
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return {"weight": Term("n...v,n...d->nvd", OneHot(input, weight.shape[0], padding_idx), g)}


def _has_rows_of_ids(use, shapes):
    """Bags are rows of ids, or all ids of a sample, and their weights, where there are any, are the samples' own."""
    weights = use.arguments.get("per_sample_weights") is None or use.has_samples("per_sample_weights")
    return weights and (use.arguments.get("offsets") is None or use.output == Layout(0))


@rule(
    F.embedding_bag,
    of=("weight",), batched=("input",), refuse=OVER_THE_BATCH, applies=_has_rows_of_ids,
    ignore=WITHOUT_INFLUENCE | {"include_last_offset": "it is the offsets': all ids of a sample are one bag"},
)  # fmt: skip
def embedding_bag(g, input, weight, offsets=None, mode="mean", per_sample_weights=None, padding_idx=None):
    """y = Σ_l s_l W[ids_l]        dW_n[v] = Σ_{k, l: ids_nkl = v} s_nkl g_nk,   s = 1 / L for a mean

    Of a largest value each feature takes its own row: s is 1 there.
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    if offsets is not None:
        input = input.unsqueeze(1)
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.unsqueeze(1)
    counted = torch.ones_like(input, dtype=torch.bool) if padding_idx is None else input != padding_idx
    if mode == "max":
        rows = weight[input].masked_fill(~counted[..., None], -torch.inf)
        input = input.gather(-1, rows.argmax(-2))  # [n, k, features]
        g = g.diag_embed()
    else:
        g = computable(g)[..., None, :]
        if mode == "mean":
            g = g / counted.sum(-1)[..., None, None].clamp(min=1)
        g = g * per_sample_weights[..., None] if per_sample_weights is not None else g
        g = g.expand(*input.shape, g.shape[-1])
    return {"weight": Term("n...v,n...d->nvd", OneHot(input, weight.shape[0], padding_idx), g)}


def _reads_by_samples(use, index):
    """Whether tensors with samples index what all samples share."""
    batched = any(_is_batched(slot, use) for slot in slots_of(index))
    return batched and reads_by_tensors(index) and use.is_shared("input")


def _takes_item(use, shapes):
    """Of a parameter alone, whatever holds no tensor; None is a new dim there."""
    index = use.arguments.get("index")
    if use.output is None:
        return all(shapes[slot.position] is None for slot in slots_of(index))
    items = index if isinstance(index, tuple) else (index,)
    return not any(item is None or isinstance(item, bool) for item in items) and _reads_by_samples(use, index)


@rule(operator.getitem, of=("input",), shared=True, applies=_takes_item)
def getitem(g, input, index, use):
    """y = W[ids]        dW_n[v] = Σ_{k: ids_nk = v} g_nk,   and for slices: g where they were cut"""
    batched = use.output is not None
    index = index if isinstance(index, tuple) else (index,)
    if batched and len(index) > 1:
        return {"input": _read_at(g, input, index, use.arguments["index"], use)}
    if batched:
        ids = index[0].remainder(input.shape[0])
        return {"input": Term("n...v,n...d->nvd", OneHot(ids, input.shape[0]), g, shape=input.shape)}
    if any(isinstance(item, list) for item in index):  # may name a place twice
        places = torch.arange(input.numel(), device=g.device).view(input.shape)[index].flatten()
        grad = g.new_zeros(g.shape[0], input.numel()).index_add(1, places, g.flatten(1))
        return {"input": grad.view(g.shape[0], *input.shape)}
    grad = g.new_zeros(g.shape[0], *input.shape)
    grad[(slice(None), *index)] = g
    return {"input": grad}


@rule("index", of=("input",), applies=lambda use, shapes: _reads_by_samples(use, use.arguments["indices"]))
def index(g, input, indices, use):
    """y = W[ids, .., jds]        dW_n[v, .., u] = Σ_{k: ids_nk = v, .., jds_nk = u} g_nk"""
    return {"input": _read_at(g, input, indices, use.arguments["indices"], use)}


def _reads_shared(use, shapes):
    """Of a vector or more, which all samples share."""
    return use.is_shared("input") and len(shapes[use.arguments["input"].position]) > 0


def _has_equal_ranks(use, shapes):
    """An empty index may have any number of dims."""
    read, index = use.arguments["input"], use.arguments["index"]
    return _reads_shared(use, shapes) and len(shapes[index.position]) == len(shapes[read.position])


@rule(
    "gather",
    of=("input",), batched=("index",), applies=_has_equal_ranks, ignore={"sparse_grad": "grad_sample is dense"},
)  # fmt: skip
def gather(g, input, dim, index):
    """y_k = W[.., ids_k, ..]      dW_n[.., v, ..] = Σ_{k: ids_nk = v} g_nk, where the other places are k's own"""
    return {"input": _read_along(g, input, dim, index)}


@rule("take_along_dim", of=("input",), batched=("indices",), applies=_reads_shared)
def take_along_dim(g, input, indices, dim=None):
    """y_k = W[.., ids_k, ..]      the same, but W and ids repeat what they have once"""
    if dim is None:
        return {"input": _at_places(g, input, indices.flatten(1).remainder(input.numel()))}
    return {"input": _read_along(g, input, dim, indices)}


@rule("index_select", of=("input",), batched=("index",), applies=_reads_shared)
def index_select(g, input, dim, index):
    """y = W[.., ids, ..]          dW_n[.., v, ..] = Σ_{k: ids_nk = v} g_nk"""
    dim, rank = dim % input.dim(), input.dim()
    rows = index.remainder(input.shape[dim]).view(index.shape[0], *[1] * dim, -1, *[1] * (rank - 1 - dim))
    return {"input": _read_along(g, input, dim, rows)}


def _at_places(g, input, places):
    """The gradient of ``input.flatten()[places]``: a table of single numbers."""
    places = places.expand(g.shape[0], *places.shape[1:]).reshape(g.shape[0], -1)
    numbers = g.reshape(g.shape[0], -1, 1)
    return Term("n...v,n...d->nvd", OneHot(places, input.numel()), numbers, shape=input.shape)


def _read_along(g, input, dim, index):
    """The gradient of ``take_along_dim(W, index, dim)``, from where it reads in W as a vector."""
    shape, sizes, dim = input.shape, g.shape[1:], dim % input.dim()
    places = index.remainder(shape[dim]) * math.prod(shape[dim + 1 :])
    for other, (own, size) in enumerate(zip(shape, sizes, strict=True)):
        if other != dim and not is_one(own):
            line = torch.arange(size, device=index.device) * math.prod(shape[other + 1 :])
            places = places + line.view(size, *[1] * (len(shape) - 1 - other))
    return _at_places(g, input, places.expand(places.shape[0], *sizes))


def _read_at(g, input, index, template, use):
    """The gradient of ``W[ids, .., 2:, jds]``: its places are what the same reads of numbered elements."""
    table = torch.arange(input.numel(), device=g.device).view(input.shape)
    index = [slice(None) if item is None else item for item in index]
    ranks = [item.dim() - _is_batched(t, use) for item, t in zip(index, template, strict=True) if isinstance(t, Slot)]
    dim = 0
    places: list[Any] = []
    for item, slot in zip(index, template, strict=True):
        if not isinstance(slot, Slot):
            table = table[(slice(None),) * dim + (item,)]
            if isinstance(item, slice):
                dim, places = dim + 1, [*places, slice(None)]
            continue
        ids = item if _is_batched(slot, use) else item.unsqueeze(0)
        ids = ids.remainder(table.shape[dim])
        places.append(ids.view(ids.shape[0], *[1] * (max(ranks) - ids.dim() + 1), *ids.shape[1:]))
        dim = dim + 1
    tensors = [i for i, item in enumerate(places) if not isinstance(item, slice)]
    together = tensors[-1] - tensors[0] + 1 == len(tensors)
    before = tensors[0] if together else 0
    return _at_places(g, input, table[tuple(places)].movedim(before, 0))


def _is_batched(slot, use):
    return use.layouts[slot.position] is not None


def reads_by_tensors(template: Any) -> bool:
    """Return whether an index is made of tensors, numbers and slices alone, of tensors at least one."""
    items = template if isinstance(template, tuple | list) else (template,)
    allowed = all(item is None or isinstance(item, Slot | int | slice) for item in items)
    return allowed and any(isinstance(item, Slot) for item in items)


def reads_by_lists(template: Any) -> bool:
    """Return whether an index names places in lists of numbers, and in no tensor."""
    items = template if isinstance(template, tuple) else (template,)
    return any(isinstance(item, list) for item in items) and not any(isinstance(item, Slot) for item in items)
