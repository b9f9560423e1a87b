"""Recurrent modules and packed sequences."""

from __future__ import annotations

from torch import _VF, nn

pack_rows = _VF._pack_padded_sequence
"""Padded values and lengths, longest first, as packed rows and their batch_sizes.

Why: `pack_padded_sequence` sorts samples; our operators keep the user's order.
Since: torch 2.11 to 2.13, tested.
Without: packed sequences have no per-sample gradients.
"""

pad_rows = _VF._pad_packed_sequence
"""Packed rows as padded values and lengths: what undoes `pack_rows`.

Why: `pad_packed_sequence` takes a PackedSequence, and gives samples the order in it.
Since: torch 2.11 to 2.13, tested.
Without: packed sequences have no per-sample gradients.
"""


def flat_weight_names(module: nn.RNNBase) -> list[str]:
    """The names of a recurrent module's parameters in the order its op takes them.

    Why: ``module.all_weights`` holds cached tensors, which may be old ones.
    Since: torch 2.11 to 2.13, tested.
    Without: nn.LSTM, nn.GRU and nn.RNN are not captured.
    """
    names: list[str] = module._flat_weights_names
    return names
