"""An optimizer that Opacus made, as one of another class."""

from __future__ import annotations

from typing import Any

from opacus.optimizers import DPOptimizer


def remade(made: DPOptimizer, kind: Any, **more: Any) -> Any:
    """A new optimizer of this class with the settings of the one that Opacus made, and its accountant's hook."""
    optimizer = kind(
        made.original_optimizer,
        noise_multiplier=made.noise_multiplier,
        max_grad_norm=made.max_grad_norm,
        expected_batch_size=made.expected_batch_size,
        loss_reduction=made.loss_reduction,
        generator=made.generator,
        secure_mode=made.secure_mode,
        **more,
    )
    optimizer.attach_step_hook(made.step_hook)
    return optimizer
