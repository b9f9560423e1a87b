"""Recurrent modules and packed sequences."""

from __future__ import annotations

from torch import _VF, nn

pack_rows = _VF._pack_padded_sequence
pad_rows = _VF._pad_packed_sequence
"""Padded values and lengths, longest first, as packed rows and their batch_sizes; and the way back.

Why: `pack_padded_sequence` sorts samples, and `pad_packed_sequence` keeps that order; our operators keep the user's.
Without: packed sequences have no per-sample gradients.
"""


def flat_weight_names(module: nn.RNNBase) -> list[str]:
    """The names of a recurrent module's parameters in the order its op takes them.

    Why: ``module.all_weights`` holds cached tensors, which may be old ones.
    Without: nn.LSTM, nn.GRU and nn.RNN are not captured.
    """
    names: list[str] = module._flat_weights_names
    return names
