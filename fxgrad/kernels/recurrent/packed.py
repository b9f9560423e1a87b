"""Packed sequences as operators that keep the samples in the user's own order.

A `PackedSequence` holds the rows of all samples step by step: at step t the ``batch_sizes[t]`` samples that are
not over yet, longest first; ``sorted_indices`` says which samples these are. Which sample a row belongs to is
known at run time only, so sorting stays inside of these operators: outside of them samples have a dimension
of their own, in the order of the user, or are the rows of packed data (`Layout.rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fxgrad.errors import OptionError
from fxgrad.host.rnn import pack_rows, pad_rows
from fxgrad.kernels.operators import operator

_SAMPLES = "_fxgrad_samples"  # on fake batch_sizes: the number of samples


def _lengths(batch_sizes: Tensor) -> Tensor:
    """Return how many steps the samples have, longest first."""
    sizes = batch_sizes.cpu()
    return (sizes[None, :] > torch.arange(int(sizes[0]))[:, None]).sum(1)


def _dynamic_size() -> Any:
    """Return a size that the values decide, at run time."""
    return torch.library.get_ctx().new_dynamic_size(min=1)


def _rows(data: Tensor, order: Tensor, length: Any) -> Tensor:
    """Return what ``[length, B, *]`` of packed data is like."""
    return data.new_empty(length, order.shape[0], *data.shape[1:])


def _fake_pack(x: Tensor, lengths: Tensor, enforce_sorted: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, steps = _dynamic_size(), _dynamic_size()
    order = torch.empty(x.shape[1], dtype=torch.int64, device=x.device)
    sizes = torch.empty(steps, dtype=torch.int64, device="cpu")
    setattr(sizes, _SAMPLES, x.shape[1])  # for `sorted_order`, while Dynamo traces
    return x.new_empty(rows, *x.shape[2:]), sizes, order


def _fake_order(data: Tensor, batch_sizes: Tensor) -> Tensor:
    size = getattr(batch_sizes, _SAMPLES, None)
    return torch.empty(_dynamic_size() if size is None else size, dtype=torch.int64, device=data.device)


def _keep_pack(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, (inputs[0], *output[1:]), None)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the length of what comes first, and the batch sizes and the order behind it."""
    ctx.length, ctx.others = inputs[0].shape[0], len(inputs) - 1
    ctx.save_for_backward(inputs[1], inputs[2])


def _backward_by_padding(ctx: Any, g: Tensor, *others: Any) -> Any:
    return torch.ops.fxgrad.pad_packed(g, *ctx.saved_tensors, ctx.length, 0.0), *[None] * ctx.others


def _backward_by_packing(ctx: Any, g: Tensor) -> Any:
    return torch.ops.fxgrad.repack(g, *ctx.saved_tensors, ctx.length), *[None] * ctx.others


@operator(_fake_pack, keep=_keep_pack, backward=_backward_by_padding)
def pack(x: Tensor, lengths: Tensor, enforce_sorted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``[T, B, *]`` -> packed data ``[rows, *]``, batch_sizes ``[steps of the longest]`` and sorted_indices ``[B]``."""
    lengths = lengths.to("cpu", torch.int64)
    order = torch.arange(len(lengths))
    if not enforce_sorted:
        lengths, order = torch.sort(lengths, descending=True)
        x = x.index_select(1, order.to(x.device))
    data, sizes = pack_rows(x, lengths, False)
    return data.clone(), sizes, order.to(x.device)


@operator(_fake_order)
def sorted_order(data: Tensor, batch_sizes: Tensor) -> Tensor:
    """Return the sorted_indices of a PackedSequence without any: ``0 .. B - 1``, as its samples were sorted."""
    raise NotImplementedError("a pass of fxgrad replaces this op by the indices with which the samples were packed")


NOT_UNDONE = "the unsorted_indices of a PackedSequence do not undo its sorted_indices, so samples come out as others"


def _undone(order: Tensor, unsorted: Tensor | None) -> Tensor:
    """Return the indices that undo an order; check a PackedSequence's own without waiting for a GPU."""
    if unsorted is None:
        return order.argsort()
    right = (order[unsorted] == torch.arange(len(order), device=order.device)).all()
    if right.is_cuda:
        torch.ops.aten._assert_async.msg(right, NOT_UNDONE)
    elif not right:
        raise OptionError(NOT_UNDONE, advice="Pass sorted_indices.argsort(), or leave unsorted_indices out.")
    return unsorted


@operator(
    lambda data, sizes, order, length, value, unsorted=None: _rows(data, order, length),
    keep=_keep,
    backward=_backward_by_packing,
)
def pad_packed(
    data: Tensor, batch_sizes: Tensor, order: Tensor, length: int, value: float, unsorted: Tensor | None = None
) -> Tensor:
    """Packed data ``[rows, *]`` -> ``[length, B, *]``, ``value`` behind the end of each sample.

    ``unsorted`` are the PackedSequence's own unsorted_indices.
    """
    if length < len(batch_sizes):
        raise ValueError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={length} and max sequence length being {len(batch_sizes)}"
        )
    padded = pad_rows(data, batch_sizes, False, value, length)[0]
    return padded.index_select(1, _undone(order, unsorted))


@operator(
    lambda data, sizes, order, value, unsorted=None: _rows(data, order, _dynamic_size()),
    keep=_keep,
    backward=_backward_by_packing,
)
def pad_packed_to_longest(
    data: Tensor, batch_sizes: Tensor, order: Tensor, value: float, unsorted: Tensor | None = None
) -> Tensor:
    """`pad_packed` to the length of the longest sample, as `pad_packed_sequence` does it."""
    return pad_packed(data, batch_sizes, order, len(batch_sizes), value, unsorted)


@operator(lambda x, sizes, order, rows: x.new_empty(rows, *x.shape[2:]), keep=_keep, backward=_backward_by_padding)
def repack(x: Tensor, batch_sizes: Tensor, order: Tensor, rows: int) -> Tensor:
    """``[T, B, *]`` -> the rows of packed data ``[rows, *]``, as ``batch_sizes`` and ``order`` have them."""
    data: Tensor = pack_rows(x.index_select(1, order), _lengths(batch_sizes), False)[0]
    return data.clone()


@operator(lambda x, sizes, order, unsorted=None: torch.empty(order.shape[0], dtype=torch.int64, device="cpu"))
def packed_lengths(x: Tensor, batch_sizes: Tensor, order: Tensor, unsorted: Tensor | None = None) -> Tensor:
    """Return how many steps each sample of x, packed or padded, has: ``[B]``."""
    return _lengths(batch_sizes)[_undone(order, unsorted).cpu()]


@operator(lambda data, sizes, order, gradient: _rows(data, order, sizes.shape[0]))
def rows_of_samples(data: Tensor, batch_sizes: Tensor, order: Tensor, gradient: bool) -> Tensor:
    """Packed data ``[rows, *]`` -> ``[T, B, *]``: behind its end, a sample's first row again, or zeros.

    A gradient is padded with zeros; what it is multiplied with, with a row that surely has values.
    """
    padded = pad_packed(data, batch_sizes, order, len(batch_sizes), 0.0)
    if gradient:
        return padded
    time = torch.arange(len(batch_sizes))
    over = (time[:, None] >= packed_lengths(data, batch_sizes, order)).to(data.device)
    return torch.where(over.view(*over.shape, *[1] * (data.dim() - 1)), padded[:1], padded)


def map_packs(value: Any, replace: Callable[[PackedSequence], PackedSequence]) -> Any:
    """Return a nest of tuples, lists and dicts with every PackedSequence replaced."""
    if isinstance(value, PackedSequence):
        return replace(value)
    if type(value) in (tuple, list):
        return type(value)(map_packs(item, replace) for item in value)
    return {key: map_packs(item, replace) for key, item in value.items()} if type(value) is dict else value


def with_indices(value: Any, made: dict[int, Tensor]) -> Any:
    """Return a nest of inputs in which every PackedSequence has its indices; ``made`` are those that it had not."""

    def with_order(packed: PackedSequence) -> PackedSequence:
        if packed.sorted_indices is not None:
            return packed
        data, batch_sizes, _, unsorted = packed
        order = torch.arange(int(batch_sizes[0]), device=data.device)
        new = [order] if unsorted is not None else [order, order.clone()]
        made.update({id(indices): indices for indices in new})
        return PackedSequence(data, batch_sizes, order, new[-1] if unsorted is None else unsorted)

    return map_packs(value, with_order)


def as_pytorch_packs(value: Any, made: dict[int, Tensor]) -> Any:
    """Return a nest of outputs with every PackedSequence as PyTorch has it: without the indices that were made."""

    def without_made(packed: PackedSequence) -> PackedSequence:
        data, batch_sizes, *indices = packed
        return PackedSequence(data, batch_sizes, *(None if id(one) in made else one for one in indices))

    return map_packs(value, without_made)
