"""Parameters that are moved about: reshaped, transposed, cut, joined, handed to every sample."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxgrad.rules.reduce import sum_dims, summed_to
from fxgrad.rules.registry import rule


@rule(
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone",
    "view_as", "reshape_as", "ravel", "_unsafe_view", "alias",
    of=("input",), shared=True, permutes=True,
    ignore=dict.fromkeys(
        ("size", "shape", "start_dim", "end_dim", "dim", "sizes", "other", "memory_format"),
        "the parameter's own shape says where the gradient belongs",
    ),
)  # fmt: skip
def reshape(g, input):
    """y = W in another shape      dW_n = g_n in W's shape"""
    return {"input": g.reshape(g.shape[0], *input.shape)}


@rule("to", "float", "double", "half", "bfloat16", "type_as", of=("input",), shared=True, permutes=True,
      ignore=dict.fromkeys(("dtype", "device", "other", "copy", "non_blocking", "memory_format"),
                           "the gradient goes back to the parameter's own dtype"))  # fmt: skip
def cast(g, input):
    """y = W in another dtype      dW_n = g_n in W's dtype"""
    g = g.real if g.is_complex() and not input.is_complex() else g
    return {"input": g.to(input.dtype)}


@rule("transpose", of=("input",), shared=True, permutes=True)
def transpose(g, input, dim0, dim1):
    """y = W with two dims swapped      dW_n = g_n with them swapped back"""
    ndim = input.dim()
    if ndim == 0:
        return {"input": g}
    return {"input": g.transpose(1 + dim0 % ndim, 1 + dim1 % ndim)}


@rule("t", "T", "mT", of=("input",), shared=True, permutes=True)
def matrix_transpose(g, input, use):
    """y = Wᵀ      dW_n = g_nᵀ"""
    if use.op == "T":
        return {"input": g.permute(0, *range(g.dim() - 1, 0, -1))}
    return {"input": g.mT if input.dim() >= 2 else g}


@rule("permute", of=("input",), shared=True, permutes=True)
def permute(g, input, dims):
    """y = W permuted      dW_n = g_n permuted back"""
    back = sorted(range(input.dim()), key=lambda i: dims[i] % input.dim())
    return {"input": g.permute(0, *(1 + i for i in back))}


@rule(
    "expand", "expand_as", "broadcast_to",
    of=("input",), shared=True,
    ignore=dict.fromkeys(("size", "other", "implicit"), "the gradient's shape says it"),
)  # fmt: skip
def expand(g, input):
    """y = copies of W      dW_n = Σ over sample n's copies of g"""
    return {"input": summed_to(g, input.shape)}


@rule("repeat", of=("input",), shared=True, ignore={"repeats": "the gradient's shape says it"})
def repeat(g, input):
    """y = W tiled      dW_n = Σ over sample n's tiles of g"""
    shape = (1,) * (g.dim() - 1 - input.dim()) + tuple(input.shape)
    if not shape or 0 in shape:
        return {"input": g.new_zeros(g.shape[0], *input.shape) if 0 in shape else g}
    split = [part for size, own in zip(g.shape[1:], shape, strict=True) for part in (size // own, own)]
    return {"input": sum_dims(g.reshape(g.shape[0], *split), range(1, 2 * len(shape), 2), input.shape)}


@rule("cat", of=("tensors",), shared=True, slices=True)
def cat(g, tensors, use, dim=0):
    """y = [.., W, ..]      dW_n = the part of g_n where W is"""
    rank = g.dim() - 1
    dim, start, grads = dim % rank, 0, []
    for slot, tensor in zip(use.arguments["tensors"], tensors, strict=True):
        if tuple(tensor.shape) == (0,) and rank > 1:  # PyTorch lets an empty vector stand for nothing
            grads.append(g.new_zeros(g.shape[0], 0) if slot.position in use.wrt else None)
            continue
        size = tensor.shape[dim + (use.layouts[slot.position] is not None)]
        grads.append(g.narrow(1 + dim, start, size) if slot.position in use.wrt else None)
        start = start + size
    return {"tensors": grads}


@rule("stack", of=("tensors",), shared=True)
def stack(g, tensors, use, dim=0):
    """y = [.., W, ..] along a new dim      dW_n = g_n at W's place"""
    dim = dim % (g.dim() - 1)
    slots = use.arguments["tensors"]
    return {"tensors": [g.select(1 + dim, i) if s.position in use.wrt else None for i, s in enumerate(slots)]}


@rule("select", of=("input",), shared=True)
def select(g, input, dim, index):
    """y = W at one index      dW_n = g_n there, 0 elsewhere"""
    grad = g.new_zeros(g.shape[0], *input.shape)
    grad.select(1 + dim % input.dim(), index).copy_(g)
    return {"input": grad}


@rule("narrow", of=("input",), shared=True, slices=True)
def narrow(g, input, dim, start, length):
    """y = a range of W      dW_n = g_n there, 0 elsewhere"""
    return {"input": _placed(g, input, dim, start)}


@rule("chunk", "split", "unbind", "tensor_split", "split_with_sizes", of=("input",), shared=True, slices=True,
      ignore=dict.fromkeys(("chunks", "split_size", "split_sizes", "sections", "indices"), "see use"))  # fmt: skip
def pieces(g, input, use, dim=0):
    """y = one of W's pieces      dW_n = g_n there, 0 elsewhere"""
    if use.op == "unbind":
        return select(g, input, dim, use.select)
    values = [None] * len(use.layouts)
    values[next(iter(use.wrt))] = torch.empty(input.shape, device="meta")
    whole = replace(use, select=None).rerun(values)
    start = sum(piece.shape[dim] for piece in whole[: use.select])
    return {"input": _placed(g, input, dim, start)}


def _placed(g, input, dim, start):
    """g_n inside zeros of W's shape, from ``start`` along ``dim``."""
    dim = dim % input.dim()
    grad = g.new_zeros(g.shape[0], *input.shape)
    grad.narrow(1 + dim, start, g.shape[1 + dim]).copy_(g)
    return grad
