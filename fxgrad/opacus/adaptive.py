"""Opacus's adaptive clipping, with support for empty batches."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer

from fxgrad.opacus.arguments import ADAPTIVE
from fxgrad.opacus.remaking import remade


class AdaptiveOptimizer(AdaClipDPOptimizer):  # type: ignore[misc]
    """Opacus's AdaClipDPOptimizer with support for empty batches; `make_private` makes it.

    The share of unclipped samples is ``(count + σ_u N(0, 1)) / B``. For an empty batch, B is the expected batch size,
    as for every batch in Andrew et al. (2019), https://arxiv.org/abs/1905.03871.
    """

    sample_size: int | float
    unclipped_num: Any

    def clip_and_accumulate(self) -> None:
        rows = self._get_flat_grad_sample(self.params[0])
        if len(rows):
            super().clip_and_accumulate()
            return
        DPOptimizer.clip_and_accumulate(self)
        self.unclipped_num = self.unclipped_num + torch.zeros((), device=rows.device)

    def update_max_grad_norm(self) -> None:
        self.sample_size = self.sample_size or self.expected_batch_size
        super().update_max_grad_norm()


def adaptive(base: AdaClipDPOptimizer) -> AdaptiveOptimizer:
    """Return an `AdaptiveOptimizer` in place of Opacus's optimizer, with its accountant's hook."""
    optimizer: AdaptiveOptimizer = remade(base, AdaptiveOptimizer, **{name: getattr(base, name) for name in ADAPTIVE})
    return optimizer
