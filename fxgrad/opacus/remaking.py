"""Conversion of an optimizer that Opacus made to another class."""

from __future__ import annotations

from typing import Any

from opacus.optimizers import DPOptimizer


def remade(private: DPOptimizer, kind: Any, **more: Any) -> Any:
    """Make an optimizer of class ``kind`` with the settings and the accountant's hook of Opacus's optimizer."""
    optimizer = kind(
        private.original_optimizer,
        noise_multiplier=private.noise_multiplier,
        max_grad_norm=private.max_grad_norm,
        expected_batch_size=private.expected_batch_size,
        loss_reduction=private.loss_reduction,
        generator=private.generator,
        secure_mode=private.secure_mode,
        **more,
    )
    optimizer.attach_step_hook(private.step_hook)
    return optimizer
