"""Opacus's optimizers for gradients that the backward has clipped already: they add noise, and count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from torch import Tensor, nn

from fxgrad.capture import Engine
from fxgrad.errors import AlreadySet, OptionError
from fxgrad.quantities import ClippedGrad


class _OneBackward:
    """What both optimizers look at before they take p.grad for a sum of clipped gradients."""

    max_grad_norm: float
    params: list[nn.Parameter]
    attach_step_hook: Any

    def __init__(
        self, *args: Any, reported: Callable[[], Any], poisson_sampling: bool = True, **arguments: Any
    ) -> None:
        super().__init__(*args, **arguments)
        self.reported, self.poisson_sampling = reported, poisson_sampling
        self.clipped_to = self.max_grad_norm
        self._backwards, self._foreign = 0, False
        self._task: int | None = None  # the last backward that reached a parameter, and what it reported
        self._report: Any = None
        self._iterations = 1
        for parameter in self.params:
            parameter.register_post_accumulate_grad_hook(self._reached)

    def _reached(self, parameter: Tensor) -> None:
        """A backward adds to p.grad: at its end it is counted, and has reported new norms if it clipped."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        report = self.reported()
        self._foreign |= report is None or report is self._report
        self._report = report
        self._backwards += 1

    @property
    def accumulated_iterations(self) -> int:
        """The backwards since the last step: the accountant's rate and the mean are over all of them."""
        return self._iterations

    def accumulate(self) -> None:
        """p.grad -> p.summed_grad, and no p.grad is left that a forgotten zero_grad() would add twice."""
        backwards = self._backwards
        if self._foreign:
            raise OptionError(
                "a backward that did not clip has added to p.grad",
                advice="Call the model that make_private returned, not the one it was given.",
            )
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
        for parameter in self.params:
            if parameter.grad is None:  # no samples, or none that reached it
                parameter.grad = torch.zeros_like(parameter)
        super().accumulate()  # type: ignore[misc]
        self._forget()
        self._iterations = max(1, backwards)
        for parameter in self.params:
            parameter.grad = None

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._forget()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def _forget(self) -> None:
        self._backwards, self._foreign = 0, False


class OneBackwardOptimizer(_OneBackward, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """Opacus's DPOptimizerFastGradientClipping behind `fxgrad.ClippedGrad`; `make_private` makes it.

    Its step is ``p.grad = (p.grad + σ C N(0, 1)) / E``, in p's units, with E the expected batch size (1 where
    ``loss_reduction="sum"``). It raises AlreadySet where several batches have been added under Poisson sampling, and
    OptionError where max_grad_norm is no longer that of the backward.
    """


class DistributedOneBackwardOptimizer(_OneBackward, DistributedDPOptimizerFastGradientClipping):  # type: ignore[misc]
    """The same in every process: the sum over the processes, with the noise of one.

    PyTorch's DistributedDataParallel has averaged p.grad over W processes, and Opacus's class of that name has not.
    The sum over the processes that follows is that of all samples in either case: W times the average, or W parts.
    """


def one_backward(made: DPOptimizer, engine: Engine, poisson_sampling: bool) -> DPOptimizer:
    """The optimizer Opacus made for grad_sample as one for clipped gradients, with its accountant's hook."""
    place = next(i for i, quantity in enumerate(engine.options.quantities) if isinstance(quantity, ClippedGrad))
    kinds = {DPOptimizer: OneBackwardOptimizer, DistributedDPOptimizer: DistributedOneBackwardOptimizer}
    optimizer = kinds[type(made)](
        made.original_optimizer,
        noise_multiplier=made.noise_multiplier,
        max_grad_norm=made.max_grad_norm,
        expected_batch_size=made.expected_batch_size,
        loss_reduction=made.loss_reduction,
        generator=made.generator,
        secure_mode=made.secure_mode,
        reported=lambda: engine.store.results.get(place),
        poisson_sampling=poisson_sampling,
    )
    optimizer.attach_step_hook(made.step_hook)
    return optimizer
