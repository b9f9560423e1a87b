"""Recurrent modules and packed sequences."""

from __future__ import annotations

from typing import Any

from torch import _VF, Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

pack_rows = _VF._pack_padded_sequence
pad_rows = _VF._pad_packed_sequence
"""Padded values and lengths, longest first, as packed rows and their batch_sizes; and the way back.

Why: `pack_padded_sequence` sorts samples, and `pad_packed_sequence` keeps that order; our operators keep the user's.
Without: packed sequences have no per-sample gradients.
"""


def flat_weights(module: nn.RNNBase) -> list[Tensor]:
    """Return what a recurrent module's op takes: its cached list, unless an attribute is another tensor than before.

    Why: PyTorch's forward reads ``_flat_weights``, which a model may fill by itself. It compares the attributes with
    ``_flat_weight_refs`` and fills the list again if one is new, as one with a parametrization always is.
    Since: torch 2.11 to 2.13, tested.
    Without: nn.LSTM, nn.GRU and nn.RNN are not captured.
    """
    weights: list[Tensor] = [getattr(module, name) for name in module._flat_weights_names]
    if is_parametrized(module):  # Dynamo would wrap the last call's tensors, which are no leaves
        return weights
    refs: Any = module._flat_weight_refs
    if any([ref is not None and ref() is not weight for ref, weight in zip(refs, weights, strict=True)]):
        return weights  # the list may hold tensors of functional_call, which are no leaves: Dynamo must not see it
    cached: Any = module._flat_weights
    return list(cached)


def refresh_weights(module: nn.RNNBase) -> None:
    """Let a recurrent module's list hold its attributes again, as PyTorch's forward does first of all.

    Why: after functional_call the list and its references lead to that call's tensors, whose ``.grad`` Dynamo reads.
    Since: torch 2.11 to 2.13, tested.
    Without: a call after functional_call warns of the ``.grad`` of a tensor that is not a leaf.
    """
    if not is_parametrized(module):
        module._update_flat_weights()
