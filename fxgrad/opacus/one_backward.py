"""Opacus's optimizers for clipped gradients: `OneBackwardOptimizer` reads the clipped sum from p.grad."""

from __future__ import annotations

from typing import Any

from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)

from fxgrad.engine import Engine
from fxgrad.errors import AlreadySet, OptionError
from fxgrad.opacus.checked_step import CheckedStep
from fxgrad.opacus.ledger import Ledger
from fxgrad.opacus.remaking import remade


class _OneBackward(CheckedStep):
    """The common base of both optimizers, in which p.grad is a sum of clipped gradients."""

    attach_step_hook: Any

    def __init__(self, *args: Any, ledger: Ledger, poisson_sampling: bool = True, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.ledger, self.poisson_sampling = ledger, poisson_sampling
        self.clipped_to = self.max_grad_norm
        self._iterations = 1
        ledger.cleared(())

    @property
    def accumulated_iterations(self) -> int:
        """The number of backwards since the last step; the accountant's rate and the mean cover all of them."""
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
        super().accumulate()  # type: ignore[misc]
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


def one_backward(private: DPOptimizer, engine: Engine, poisson_sampling: bool) -> DPOptimizer:
    """Return an optimizer for clipped gradients in place of Opacus's, with its accountant's hook."""
    kinds = {DPOptimizer: OneBackwardOptimizer, DistributedDPOptimizer: DistributedOneBackwardOptimizer}
    return remade(private, kinds[type(private)], ledger=Ledger(engine, "grad"), poisson_sampling=poisson_sampling)
