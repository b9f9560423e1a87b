"""Packed sequences as operators that keep the samples in the user's own order.

A `PackedSequence` holds the rows of all samples step by step: at step t the ``batch_sizes[t]`` samples that are
not over yet, longest first; ``sorted_indices`` says which samples these are. Which sample a row belongs to is
known at run time only, so sorting stays inside of these operators: outside of them samples have a dimension
of their own, in the order of the user, or are the rows of packed data (`Layout.rows`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fxgrad.host.rnn import pack_rows, pad_rows


def _lengths(batch_sizes: Tensor) -> Tensor:
    """How many steps the samples have, longest first."""
    sizes = batch_sizes.cpu()
    return (sizes[None, :] > torch.arange(int(sizes[0]))[:, None]).sum(1)


@torch.library.custom_op("fxgrad::pack", mutates_args=())
def pack(x: Tensor, lengths: Tensor, enforce_sorted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``[T, B, *]`` -> packed data ``[rows, *]``, batch_sizes ``[steps of the longest]`` and sorted_indices ``[B]``."""
    lengths = lengths.to("cpu", torch.int64)
    order = torch.arange(len(lengths))
    if not enforce_sorted:
        lengths, order = torch.sort(lengths, descending=True)
        x = x.index_select(1, order.to(x.device))
    data, sizes = pack_rows(x, lengths, False)
    return data.clone(), sizes, order.to(x.device)


@pack.register_fake
def _(x: Tensor, lengths: Tensor, enforce_sorted: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, steps = (torch.library.get_ctx().new_dynamic_size(min=1) for _ in range(2))
    order = torch.empty(x.shape[1], dtype=torch.int64, device=x.device)
    return x.new_empty(rows, *x.shape[2:]), torch.empty(steps, dtype=torch.int64, device="cpu"), order


@torch.library.custom_op("fxgrad::pad_packed", mutates_args=())
def pad_packed(data: Tensor, batch_sizes: Tensor, order: Tensor, length: int, value: float) -> Tensor:
    """Packed data ``[rows, *]`` -> ``[length, B, *]``, ``value`` behind the end of each sample."""
    if length < len(batch_sizes):
        raise ValueError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={length} and max sequence length being {len(batch_sizes)}"
        )
    padded = pad_rows(data, batch_sizes, False, value, length)[0]
    return padded.index_select(1, order.argsort())


@pad_packed.register_fake
def _(data: Tensor, batch_sizes: Tensor, order: Tensor, length: int, value: float) -> Tensor:
    return data.new_empty(length, order.shape[0], *data.shape[1:])


@torch.library.custom_op("fxgrad::pad_packed_to_longest", mutates_args=())
def pad_packed_to_longest(data: Tensor, batch_sizes: Tensor, order: Tensor, value: float) -> Tensor:
    """`pad_packed` to the length of the longest sample, as `pad_packed_sequence` does it."""
    length = len(batch_sizes)
    return pad_rows(data, batch_sizes, False, value, length)[0].index_select(1, order.argsort())


@pad_packed_to_longest.register_fake
def _(data: Tensor, batch_sizes: Tensor, order: Tensor, value: float) -> Tensor:
    length = torch.library.get_ctx().new_dynamic_size(min=1)
    return data.new_empty(length, order.shape[0], *data.shape[1:])


@torch.library.custom_op("fxgrad::repack", mutates_args=())
def repack(x: Tensor, batch_sizes: Tensor, order: Tensor, rows: int) -> Tensor:
    """``[T, B, *]`` -> the rows of packed data ``[rows, *]``, as ``batch_sizes`` and ``order`` have them."""
    data: Tensor = pack_rows(x.index_select(1, order), _lengths(batch_sizes), False)[0]
    return data.clone()


@repack.register_fake
def _(x: Tensor, batch_sizes: Tensor, order: Tensor, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[2:])


@torch.library.custom_op("fxgrad::packed_lengths", mutates_args=())
def packed_lengths(x: Tensor, batch_sizes: Tensor, order: Tensor) -> Tensor:
    """How many steps each sample of x, packed or padded, has: ``[B]``."""
    return _lengths(batch_sizes)[order.argsort().cpu()]


@packed_lengths.register_fake
def _(x: Tensor, batch_sizes: Tensor, order: Tensor) -> Tensor:
    return torch.empty(order.shape[0], dtype=torch.int64, device="cpu")


@torch.library.custom_op("fxgrad::rows_of_samples", mutates_args=())
def rows_of_samples(data: Tensor, batch_sizes: Tensor, order: Tensor, gradient: bool) -> Tensor:
    """Packed data ``[rows, *]`` -> ``[T, B, *]``: behind its end, a sample's first row again, or zeros.

    A gradient is padded with zeros; what it is multiplied with, with a row that surely has values.
    """
    padded: Tensor = pad_packed(data, batch_sizes, order, len(batch_sizes), 0.0)
    if gradient:
        return padded
    time = torch.arange(len(batch_sizes))
    lengths: Tensor = packed_lengths(data, batch_sizes, order)
    over = (time[:, None] >= lengths).to(data.device)
    return torch.where(over.view(*over.shape, *[1] * (data.dim() - 1)), padded[:1], padded)


@rows_of_samples.register_fake
def _(data: Tensor, batch_sizes: Tensor, order: Tensor, gradient: bool) -> Tensor:
    return data.new_empty(batch_sizes.shape[0], order.shape[0], *data.shape[1:])


def _keep_pack(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.length = inputs[0].shape[0]
    ctx.save_for_backward(output[1], output[2])


def _pack_backward(ctx: Any, g: Tensor, *others: Any) -> Any:
    return torch.ops.fxgrad.pad_packed(g, *ctx.saved_tensors, ctx.length, 0.0), None, None


def _keep_pad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows, ctx.others = inputs[0].shape[0], len(inputs) - 1
    ctx.save_for_backward(inputs[1], inputs[2])


def _pad_backward(ctx: Any, g: Tensor) -> Any:
    return torch.ops.fxgrad.repack(g, *ctx.saved_tensors, ctx.rows), *[None] * ctx.others


def _keep_repack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.length = inputs[0].shape[0]
    ctx.save_for_backward(inputs[1], inputs[2])


def _repack_backward(ctx: Any, g: Tensor) -> Any:
    return torch.ops.fxgrad.pad_packed(g, *ctx.saved_tensors, ctx.length, 0.0), None, None, None


pack.register_autograd(_pack_backward, setup_context=_keep_pack)
pad_packed.register_autograd(_pad_backward, setup_context=_keep_pad)
pad_packed_to_longest.register_autograd(_pad_backward, setup_context=_keep_pad)
repack.register_autograd(_repack_backward, setup_context=_keep_repack)


def with_indices(value: Any, made: dict[int, Tensor]) -> Any:
    """A nest of inputs in which every PackedSequence has its indices; ``made`` are those that it had not."""
    if isinstance(value, PackedSequence):
        if value.sorted_indices is not None:
            return value
        order = torch.arange(int(value.batch_sizes[0]), device=value.data.device)
        made[id(order)] = order
        return PackedSequence(value.data, value.batch_sizes, order, order.clone())
    if type(value) in (tuple, list):
        return type(value)(with_indices(item, made) for item in value)
    return {key: with_indices(item, made) for key, item in value.items()} if type(value) is dict else value


def as_pytorch_packs(value: Any, made: dict[int, Tensor]) -> Any:
    """A nest of outputs with every PackedSequence as PyTorch has it: without the indices that were made."""
    if isinstance(value, PackedSequence):
        data, batch_sizes, order, back = value
        indices = (None, None) if id(order) in made else (order, back)
        return PackedSequence(data, batch_sizes, *indices)
    if type(value) in (tuple, list):
        return type(value)(as_pytorch_packs(item, made) for item in value)
    return {key: as_pytorch_packs(item, made) for key, item in value.items()} if type(value) is dict else value
