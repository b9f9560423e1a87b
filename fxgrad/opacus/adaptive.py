"""Opacus's adaptive clipping, for empty batches too."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer

from fxgrad.opacus.arguments import ADAPTIVE
from fxgrad.opacus.remaking import remade


class AdaptiveOptimizer(AdaClipDPOptimizer):  # type: ignore[misc]
    """Opacus's AdaClipDPOptimizer, which takes a batch of no samples as any other; `make_private` makes it.

    The share of unclipped samples is ``(count + σ_u N(0, 1)) / B``. For a batch of none B is the expected batch
    size, as it is for every batch in Andrew et al. (2019), https://arxiv.org/abs/1905.03871.
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


def adaptive(made: AdaClipDPOptimizer) -> AdaptiveOptimizer:
    """The optimizer Opacus made, with its accountant's hook."""
    optimizer: AdaptiveOptimizer = remade(made, AdaptiveOptimizer, **{name: getattr(made, name) for name in ADAPTIVE})
    return optimizer
