"""Rules of layers: convolutions, norms, pooling, attention, losses."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fxgrad.proof.calls import Call, Undecided
from fxgrad.proof.origins import added, along_dim, any_samples, folded, joined, multiplied, no_samples, total, whole
from fxgrad.proof.rules.registry import follows


@follows("convolution _convolution mkldnn_convolution")
def convolution(call: Call) -> Tensor:
    """Convolve ``[N, C, ..]``; a kernel's samples go to its output channel."""
    source, kernel = call.ids("input" if call.has("input") else "self"), call.ids("weight")
    rank = call.out_rank()
    if source.dim() != rank:
        raise Undecided("it has no dimension of samples")
    bias = along_dim(call.ids("bias"), 1, rank) if call.has("bias") else no_samples(rank)
    if "groups" in call.arguments and call.get("groups") != 1:
        return added(_grouped(call, source, kernel), bias)
    out = 1 if call.arguments.get("transposed") else 0
    rows = folded(source, range(1, rank), linear=True)
    kernels = folded(kernel, [dim for dim in range(kernel.dim()) if dim != out], linear=True)
    return added(multiplied(rows, along_dim(kernels, 1, rank)), bias)


def _grouped(call: Call, source: Tensor, kernel: Tensor) -> Tensor:
    """Contract each group of channels separately."""
    groups, rank = call.get("groups"), call.out_rank()
    transposed = bool(call.arguments.get("transposed"))
    inputs = call.shape("input" if call.has("input") else "self")[1]
    outputs = call.out_shape()[1]
    rows = folded(source, range(2, rank), linear=True)
    if rows.shape[1] != 1:
        rows = folded(rows.reshape([rows.shape[0], groups, inputs // groups]), [2], linear=True)
        rows = rows.expand(-1, -1, outputs // groups).reshape([rows.shape[0], outputs])
    rows = rows.reshape([*rows.shape[:2], *[1] * (rank - 2)])
    if transposed and bool(kernel.any()):
        raise Undecided("its kernels hold samples")
    kernels = folded(kernel, range(1, kernel.dim()), linear=True)
    return multiplied(rows, along_dim(kernels, 1, rank))


def _affine(call: Call, ids_so_far: Tensor, channel: int | None) -> Tensor:
    """Join the ids of the scale and the shift, along ``channel`` or along the last dimensions."""
    for name in ("weight", "bias"):
        if call.has(name):
            ids = call.ids(name)
            if channel is not None:
                ids = along_dim(ids, channel, ids_so_far.dim())
            ids_so_far = joined(ids_so_far, ids)
    return ids_so_far


@follows("native_layer_norm _fused_rms_norm")
def layer_norm(call: Call) -> list[Tensor]:
    ids = call.ids("input")
    count = len(call.get("normalized_shape"))
    rows = folded(ids, range(ids.dim() - count, ids.dim()))
    return [_affine(call, rows, None), *[rows] * (len(call.outputs) - 1)]


@follows("native_group_norm")
def group_norm(call: Call) -> list[Tensor]:
    """Normalise ``[N, C, ..]``; the arguments N, C and HxW must not merge several rows into one."""
    ids, shape = call.ids("input"), call.shape("input")
    count, channels, places = (call.get(name) for name in ("N", "C", "HxW"))
    parts = count % max(1, shape[0]) == 0 and count * channels * places == math.prod(shape)  # within one sample
    if not parts or (channels != shape[1] and (call.has("weight") or call.has("bias"))):
        raise Undecided("it takes its input to have another shape")
    rows = folded(ids, range(1, ids.dim()))
    return [_affine(call, rows, 1), *[rows.reshape(-1, 1)] * (len(call.outputs) - 1)]


@follows(
    """_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    native_batch_norm _batch_norm_with_update_functional _batch_norm_no_update _batch_norm_with_update"""
)
def batch_norm(call: Call) -> list[Tensor]:
    """Normalise each channel; in training mode, the statistics depend on the whole batch."""
    ids = call.ids("input")
    training = call.arguments.get("training", "no_training" not in call.name and "no_update" not in call.name)
    before = [call.ids(name) for name in ("running_mean", "running_var") if call.has(name)]
    if training:
        ids_of_result = folded(ids, [dim for dim in range(ids.dim()) if dim != 1])
        statistics = joined(ids_of_result.reshape(-1), *before)
    else:
        ids_of_result = joined(ids, *(along_dim(one, 1, ids.dim()) for one in before))
        statistics = joined(no_samples(1), *before)
    rest = [statistics if out.dim() == 1 else no_samples(out.dim()) for out in call.outputs[1:]]
    return [_affine(call, ids_of_result, 1), *rest]


@follows(
    """max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d fractional_max_pool2d fractional_max_pool3d max_unpool2d
    max_unpool3d max_pool2d_with_indices_backward max_pool3d_with_indices_backward"""
)
def images(call: Call) -> list[Tensor]:
    """Join ids over the positions of an image; the op's name has their number of dimensions."""
    places = next(int(letter) for letter in call.name.partition("_indices")[0] if letter.isdigit())
    rank, linear = call.out_rank(), call.name.startswith("upsample")
    parts = [folded(ids, range(ids.dim() - places, ids.dim()), linear=linear) for ids in call.all_ids()]
    parts = [rows if rows.dim() == rank else whole(rows).reshape([1] * rank) for rows in parts]
    result = joined(*parts) if len(parts) > 1 else parts[0]
    return [result] * len(call.outputs)


@follows("affine_grid_generator")
def affine_grid(call: Call) -> Tensor:
    """Map fixed positions by ``[N, 2, 3]`` or ``[N, 3, 4]`` to ``[N, .., 2 or 3]``."""
    return along_dim(folded(call.ids("theta"), [1, 2]), 0, call.out_rank())


@follows("grid_sampler_2d grid_sampler_3d cudnn_grid_sampler")
def grid_sampler(call: Call) -> Tensor:
    """Sample ``[N, C, ..]`` at positions ``[N, .., 2 or 3]``."""
    source, grid = call.ids("input" if call.has("input") else "self"), call.ids("grid")
    return joined(folded(source, range(2, source.dim())), folded(grid, [-1]).movedim(-1, 1))


@follows("im2col col2im")
def of_images(call: Call) -> Tensor:
    """Join the ids of ``[N, ..]`` over all dimensions but N."""
    rows = [folded(ids, range(1, ids.dim())) for ids in call.all_ids()]
    return joined(*(along_dim(row, 0, call.out_rank()) for row in rows))


@follows(
    """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_cudnn_attention"""
)
def attention(call: Call) -> list[Tensor]:
    """Join ids over the last two dimensions of query, key and value."""
    parts = [folded(call.ids(name), [-2, -1]) for name in ("query", "key", "value")]
    for name in ("attn_mask", "attn_bias"):
        if call.has(name):
            mask = call.ids(name)
            parts.append(folded(mask.reshape([1] * (4 - mask.dim()) + list(mask.shape)), [-2, -1]))
    result = joined(*parts)
    return [result, *(_beside(result, out) for out in call.outputs[1:])]


def _beside(ids: Tensor, out: Any) -> Tensor:
    """Return the ids of attention's further outputs: logsumexp, the state of a generator, a mask."""
    if not isinstance(out, Tensor):
        return no_samples(0)
    if out.dim() == 3:
        return ids.squeeze(-1)
    return any_samples(out.dim()) if out.is_floating_point() else no_samples(out.dim())


@follows("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss")
def loss(call: Call) -> Tensor:
    return _reduced(call, joined(*call.all_ids()))


@follows("multi_margin_loss multilabel_margin_loss_forward")
def margin_loss(call: Call) -> list[Tensor]:
    source, target = call.ids("self"), call.ids("target")
    rows = folded(source, [-1])
    target = target.unsqueeze(-1) if target.dim() < source.dim() else folded(target, [-1])
    if call.has("weight") and bool(call.ids("weight").any()):
        raise Undecided("its weights of classes hold samples")
    losses = joined(rows, target)
    first = _reduced(call, losses.squeeze(-1))
    return [first, *[losses] * (len(call.outputs) - 1)]


@follows("nll_loss_forward nll_loss2d_forward")
def nll_loss(call: Call) -> list[Tensor]:
    """Follow ``[N, C, ..]`` and targets ``[N, ..]``; the mean divides by a token count, made from the targets."""
    source, target = call.ids("self"), call.ids("target")
    rows = folded(source, [1] if source.dim() > 1 else [0])
    rows = rows.squeeze(1) if source.dim() > 1 else rows.reshape(target.shape)
    losses = joined(rows, target)
    if call.has("weight") and bool(call.ids("weight").any()):
        raise Undecided("its weights of classes hold samples")
    weights = total(target)  # sum of class weights
    if call.get("reduction") == 1 and call.facts.clips:  # Note [Token counts]
        losses = folded(losses, range(losses.dim()))
    return [_reduced(call, losses), *[weights] * (len(call.outputs) - 1)]


def _reduced(call: Call, ids: Tensor) -> Tensor:
    return ids if call.get("reduction") == 0 else total(ids)


@follows("_ctc_loss _use_cudnn_ctc_loss")
def ctc_loss(call: Call) -> list[Tensor]:
    """Follow ``[T, N, C]`` and targets ``[N, S]``; the offsets of concatenated targets depend on all target lengths."""
    rows = folded(call.ids("log_probs"), [0, 2]).reshape(-1)
    flat = len(call.shape("targets")) == 1
    for name in ("targets", "input_lengths", "target_lengths"):
        if call.has(name):
            ids = call.ids(name)
            whole = flat and name != "input_lengths"
            rows = joined(rows, folded(ids, range(0 if whole else 1, ids.dim())).reshape(-1))
        else:
            call.get(name)
    return [along_dim(rows, 0, out.dim()) for out in call.outputs]
