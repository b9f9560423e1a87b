"""The classes of the optimizers that `make_private` returns: Opacus's own, with the checked step."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)

from fxgrad.engine import Engine
from fxgrad.errors import AlreadySet, OptionError
from fxgrad.opacus.checked_step import CheckedStep
from fxgrad.opacus.ledger import Ledger


class AdaptiveOptimizer(CheckedStep, AdaClipDPOptimizer):  # type: ignore[misc]
    """Opacus's AdaClipDPOptimizer with support for empty batches; `make_private` makes it.

    The share of unclipped samples is ``(count + σ_u N(0, 1)) / B``. For an empty batch, B is the expected batch size,
    as for every batch in Andrew et al. (2019), https://arxiv.org/abs/1905.03871.
    """

    unclipped_num: Any
    sample_size: Any

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


class _OneBackward(CheckedStep):
    """The common base of both optimizers, in which p.grad is a sum of clipped gradients."""

    poisson_sampling: bool
    clipped_to: float  # the bound of the backward
    _iterations = 1

    @property
    def accumulated_iterations(self) -> int:
        """Return the number of backwards since the last step; the accountant's rate and the mean cover all of them."""
        return self._iterations

    def accumulate(self) -> None:
        """Move p.grad to p.summed_grad, so that a forgotten zero_grad() cannot add it twice."""
        backwards = self.ledger.deliveries
        if self.max_grad_norm != self.clipped_to:
            raise OptionError(
                f"max_grad_norm is {self.max_grad_norm} and the backward clips to {self.clipped_to}: "
                "the noise would not fit",
                advice="Leave max_grad_norm as it is, or use make_private without one_backward=True.",
            )
        if self.poisson_sampling and backwards > 1:
            raise AlreadySet(
                f"{backwards} backwards have added to p.grad since the last step: under Poisson sampling a sample may "
                "be in all of them, and count more than once",
                advice="Call step() and zero_grad() after each backward, or use Opacus's BatchMemoryManager.",
            )
        super().accumulate()
        self._iterations = max(1, backwards)
        for parameter in self.params:
            parameter.grad = None
        self.ledger.cleared(())


class OneBackwardOptimizer(_OneBackward, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """Opacus's DPOptimizerFastGradientClipping for gradients of `fxgrad.ClippedGrad`; `make_private` makes it.

    Its step is ``p.grad = (p.grad + σ C N(0, 1)) / E``, in p's units, with E the expected batch size (1 for
    ``loss_reduction="sum"``).

    Before any change, the step raises `fxgrad.errors.UnaccountedGrad` unless p.grad of every parameter is what the
    private model's backward delivered since the last step. Its parameters must be the model's trainable ones, over
    which the norm is taken. It raises AlreadySet if several batches were added under Poisson sampling, and OptionError
    if max_grad_norm is no longer that of the backward.
    """


class DistributedOneBackwardOptimizer(_OneBackward, DistributedDPOptimizerFastGradientClipping):  # type: ignore[misc]
    """`OneBackwardOptimizer` in each of several processes: the sum over the processes, with the noise of one.

    p.grad is the part of this process: `make_private` turns off the averaging of DistributedDataParallel in the
    backward. The step sums the parts of all processes.
    """


ONE_BACKWARD = {DPOptimizer: OneBackwardOptimizer, DistributedDPOptimizer: DistributedOneBackwardOptimizer}


def check_steps(private: DPOptimizer, engine: Engine, *, one_backward: bool, poisson_sampling: bool) -> None:
    """Turn Opacus's optimizer into one that checks p.grad, or p.grad_sample, against the ledger before each step.

    Opacus's classes share their attributes, so the object remains: its settings, its sums, and the accountant's hook.
    """
    if one_backward:
        private.__class__ = ONE_BACKWARD[type(private)]
        private.poisson_sampling, private.clipped_to = poisson_sampling, private.max_grad_norm
    else:
        opacus_class: Any = type(private)
        private.__class__ = _checked_class(opacus_class)
    private.begin_checks(Ledger(engine, "grad" if one_backward else "grad_sample"))


@cache
def _checked_class(kind: Any) -> Any:
    if kind is AdaClipDPOptimizer:
        return AdaptiveOptimizer
    return type(kind.__name__, (CheckedStep, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
