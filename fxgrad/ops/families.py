"""Which ops treat samples alone, by family.

An op is classified once, by its canonical name. A family says where the sample dimension may be and
what becomes of it; `fxgrad.passes.infer_samples` holds one handler per family. An op in no family is
decomposed into ATen ops that are, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import Any

import torch

from fxgrad.host.ops import OpOverload, OpOverloadPacket, schema
from fxgrad.ops.calls import Call, op_name
from fxgrad.ops.user_functions import AUTOGRAD_FUNCTION
from fxgrad.ops.worked_dims import OVER_LAST, OVER_NAMED


class Family(Enum):
    """How an op treats the sample dimension, for `fxgrad.register_op`.

    Attributes:
        ALONE: row n of every output is computed from row n of every batched input, and from nothing else.
        ELEMENTWISE: element i of the output is computed from element i of the inputs, with broadcasting.

    The other members are the families of PyTorch's own ops.

    >>> import torch, fxgrad
    >>> def halved(x):
    ...     return x / 2
    >>> fxgrad.register_op(halved, fxgrad.Family.ELEMENTWISE)
    """

    ELEMENTWISE = "elementwise"  # out[i] from in[i], with broadcasting
    MOVEMENT = "movement"  # copies values to other places: replayed on sample ids
    ALONG = "along"  # works along some dims (`dim`), alone over the others
    REDUCTION = "reduction"  # sums or averages over dims: linear, so samples may end up mixed
    CONTRACTION = "contraction"  # matrix products
    NORMALISED = "normalised"  # over the trailing dims `normalized_shape`
    PER_ROW = "per_row"  # (N, C, *): alone over dim 0
    PER_IMAGE = "per_image"  # alone over all but the spatial dims
    LOOKUP = "lookup"  # a row of a table for every id
    ATTENTION = "attention"
    LOSS = "loss"  # elementwise or per row, then reduced
    FACTORY = "factory"  # borrows shape, dtype or device only
    ALONE = "alone"  # a user's own op, promised to treat samples alone
    RECURRENT = "recurrent"  # runs over dim 0, alone over dim 1
    FUNCTION = "function"  # a user's autograd.Function: as its bodies do
    CONTROL = "control"  # cond, scan, map, while_loop: as their bodies do
    PACKED = "packed"  # packs and pads sequences
    INDEX_PUT = "index_put"  # writes at places that tensors name
    PER_INDEX = "per_index"  # gather, scatter: alone over all dims but `dim`
    SOUGHT = "sought"  # elementwise, between boundaries
    OVER_DIMS = "over_dims"  # over matrices, or dims that it names: alone over the others (worked_dims.py)


MOVEMENT = frozenset(
    """view reshape permute transpose expand repeat contiguous unsqueeze squeeze flatten unflatten
    chunk split split_with_sizes unbind select narrow roll flip detach movedim t T mT H mH adjoint
    getitem index cat stack pad index_select expand_as repeat_interleave view_as reshape_as tensor_split
    tile broadcast_to slice fliplr flipud rot90 ravel atleast_1d atleast_2d atleast_3d hstack vstack
    dstack column_stack diagonal hsplit vsplit dsplit unsafe_chunk unsafe_split constant_pad_nd
    pixel_shuffle pixel_unshuffle channel_shuffle unfold view_copy _unsafe_view
    broadcast_tensors tril triu diag_embed lift_fresh unsafe_split_with_sizes slice_copy select_copy
    expand_copy permute_copy transpose_copy unsqueeze_copy squeeze_copy narrow_copy unbind_copy diagonal_copy
    linalg_diagonal slice_scatter select_scatter diagonal_scatter cartesian_prod""".split()
)

RANDOM = frozenset(
    """dropout alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d
    native_dropout bernoulli rand randn randint rand_like randn_like randint_like randperm normal
    multinomial gumbel_softmax rrelu poisson exponential uniform cauchy log_normal geometric
    random scaled_dot_product_attention fractional_max_pool2d fractional_max_pool3d""".split()
)

# Families of PyTorch's ops and of fxgrad's own; an op that works over named dims may be a loss, too: the first counts.
_NAMES: dict[Family, Iterable[str]] = {
    Family.MOVEMENT: MOVEMENT,
    Family.REDUCTION: "sum mean nansum nanmean".split(),
    # softmax-like, cumulative and sorting ops; reductions whose result is not linear in the samples
    Family.ALONG: """softmax log_softmax softmin gumbel_softmax cumsum cumprod cummax cummin logcumsumexp sort msort
    argsort topk kthvalue mode median nanmedian max min amax amin argmax argmin any all prod var std
    var_mean std_mean logsumexp norm vector_norm linalg_vector_norm linalg_norm normalize glu
    cosine_similarity count_nonzero aminmax diff quantile nanquantile unique_consecutive
    cross linalg_cross _safe_softmax fxgrad::gather_from_region fxgrad::scatter_to_region
    fxgrad::gather_from_sequence fxgrad::reduce_scatter_to_sequence""".split(),
    Family.CONTRACTION: """linear matmul mm bmm addmm baddbmm mv addmv dot vdot inner ger outer addr rmatmul einsum
    tensordot bilinear chain_matmul linalg_multi_dot addbmm kron cdist""".split(),
    Family.NORMALISED: "layer_norm rms_norm native_layer_norm _fused_rms_norm".split(),
    Family.PER_ROW: """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution group_norm
    instance_norm native_group_norm local_response_norm interpolate upsample grid_sample affine_grid
    col2im im2col embedding_bag batch_norm upsample_bilinear upsample_nearest _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d
    fxgrad::grouped_rows""".split(),
    Family.PER_IMAGE: [
        *"lp_pool1d lp_pool2d lp_pool3d".split(),
        *(
            f"{prefix}{kind}_pool{d}d{suffix}"
            for prefix in ("", "adaptive_")
            for kind in ("avg", "max")
            for d in (1, 2, 3)
            for suffix in ("", "_with_indices")
        ),
    ],
    Family.LOSS: """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss
    hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss
    multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss""".split(),
    Family.FACTORY: """zeros ones empty full rand randn randint arange linspace logspace eye tensor
    scalar_tensor randperm new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like empty_like
    rand_like randn_like randint_like tril_indices triu_indices""".split(),
    Family.OVER_DIMS: [*OVER_LAST, *OVER_NAMED, "renorm"],
    Family.PER_INDEX: """gather scatter scatter_add scatter_reduce take_along_dim index_add index_copy
    index_fill""".split(),
    Family.INDEX_PUT: ["index_put"],
    Family.SOUGHT: ["bucketize", "searchsorted"],
    Family.LOOKUP: ["embedding"],
    Family.RECURRENT: ["fxgrad::recurrence"],
    Family.PACKED: [
        f"fxgrad::{op}" for op in ("pack", "pad_packed", "pad_packed_to_longest", "repack", "packed_lengths")
    ],
    Family.FUNCTION: [AUTOGRAD_FUNCTION],
    Family.CONTROL: [f"fxgrad.samples.control_flow.{op}" for op in ("cond", "scan", "map_impl", "while_loop")],
    Family.ATTENTION: ["scaled_dot_product_attention"],
    # without an ATen tag that says so
    Family.ELEMENTWISE: """dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d native_dropout
    bernoulli to float double half bfloat16 int long short bool type type_as clone prelu relu relu6
    gelu silu mish elu celu selu leaky_relu rrelu hardtanh hardswish hardsigmoid logsigmoid
    log_sigmoid softplus softsign tanhshrink softshrink hardshrink threshold sigmoid tanh logit
    where masked_fill copy zero fill addcmul addcdiv lerp clamp clamp_min clamp_max nan_to_num
    floor_divide remainder rsub rpow isclose real imag is_floating_point positive conj resolve_conj
    square requires_grad_ _to_copy lift_fresh_copy alias cpu cuda maximum minimum fmod float_power ldexp xlogy
    erf erfc erfinv exp exp2 expm1 isnan isinf isfinite logical_and logical_or logical_xor logical_not
    uniform normal complex polar resolve_neg special_ndtr fxgrad::copy_to_region
    fxgrad::reduce_from_region fxgrad::rows_of_region""".split(),
}
_TABLE = [(frozenset(names), family) for family, names in _NAMES.items()]
_REGISTERED: dict[str, Family] = {}
CHANGES: list[str] = []  # the ops that something was said of, each time; what was compiled before is not right any more


def draws(call: Call) -> bool:
    """Return whether a call draws random numbers: dropout in eval mode and attention without dropout do not."""
    if call.op not in RANDOM or call.get("training", call.get("train")) is False:
        return False
    return bool(call.get("dropout_p", call.get("p", 0.5)) != 0)


@cache
def family_of(op: str) -> Family | None:
    """Return the family of a canonical op name, or None for an op without one.

    >>> family_of("gelu"), family_of("permute")
    (<Family.ELEMENTWISE: 'elementwise'>, <Family.MOVEMENT: 'movement'>)
    """
    if op in _REGISTERED:
        return _REGISTERED[op]
    for names, family in _TABLE:
        if op in names:
            return family
    return Family.ELEMENTWISE if _tagged_pointwise(op) else None


def register_family(op: Any, family: Family) -> None:
    """Say how an op of one's own treats samples."""
    _REGISTERED[op_name(op)] = family
    CHANGES.append(op_name(op))
    family_of.cache_clear()


def registered() -> dict[str, Family]:
    """Return what users said of ops of their own."""
    return dict(_REGISTERED)


def _tagged_pointwise(op: str) -> bool:
    """Return whether ATen itself tags every overload of the op on tensors as pointwise."""
    packet = getattr(torch.ops.aten, op, None)
    if not isinstance(packet, OpOverloadPacket) or "::" in op:
        return False
    overloads = [
        overload
        for overload in (getattr(packet, name) for name in packet.overloads() if "out" not in name)
        if any(isinstance(argument.type, torch.TensorType) for argument in schema(overload).arguments)
    ]
    pointwise = all(torch.Tag.pointwise in overload.tags for overload in overloads)
    return bool(overloads) and pointwise and not any(map(_writes_in_place, overloads))


def _writes_in_place(overload: OpOverload) -> bool:
    """Return whether an overload writes to what it takes: ``__ilshift__`` does."""
    return any(
        arg.alias_info is not None and arg.alias_info.is_write and not arg.is_out for arg in schema(overload).arguments
    )


def believed(op: str) -> bool:
    """Return whether all that is known of an op is a user's word."""
    return op in _REGISTERED
