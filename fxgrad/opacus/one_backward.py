"""Opacus's optimizers behind fxgrad: they step only with what fxgrad delivered, and count it.

`OneBackwardOptimizer` takes the clipped sum from p.grad; the others are Opacus's own classes, which clip p.grad_sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, nn

from fxgrad.capture import Engine
from fxgrad.errors import AlreadySet, OptionError, UnaccountedGrad
from fxgrad.first_batch import FirstBatch
from fxgrad.grad_scaler import check_no_scaler_steps
from fxgrad.opacus.ledger import CLEAR, Ledger
from fxgrad.opacus.remaking import remade


class _Checked:
    """Compares with the ledger before a step moves anything."""

    ledger: Ledger
    param_groups: list[dict[str, Any]]
    params: list[nn.Parameter]
    first_batch: FirstBatch | None = None  # what the processes have still to agree on
    _check_skip_next_step: Callable[..., bool]
    max_grad_norm: float
    step_hook: Any
    _is_last_step_skipped: bool
    original_optimizer: Any
    _noised: list[tuple[Tensor | None, int]] | None = None  # p.grad between the noise and the step inside
    _left: Any = None  # by virtual steps of this logical batch
    _broken = False  # they cannot be continued

    def pre_step(self, closure: Any = None) -> Any:
        check_no_scaler_steps()
        if self.first_batch is not None and not self._check_skip_next_step(pop_next=False):
            settled = self.first_batch.settle(dist.group.WORLD, self.params[0].device)
            self.first_batch = None if settled else self.first_batch
        self.ledger.check(self.param_groups)
        for parameter in self.params:  # one that was unfrozen since has none
            parameter.__dict__.setdefault("summed_grad", None)
            _check_processed_flag(parameter.__dict__["summed_grad"])  # before anything is added to it
        self._check_sums()
        real = super().pre_step(closure)  # type: ignore[misc]
        for parameter in self.params if real else ():  # Opacus marks those of the process that adds noise
            _mark_as_processed(parameter.__dict__["summed_grad"])
        self._left, self._broken = self._sums(), False
        if real:
            self.original_optimizer._optimizer_step_pre_hooks.move_to_end(self._hook.id)
        return real

    def attach_step_hook(self, fn: Callable[..., Any]) -> None:
        """One hook more: that of the accountant stays."""
        counts: Any = self.step_hook

        def both(optimizer: Any) -> None:
            counts(optimizer)
            fn(optimizer)

        self.step_hook = fn if counts is None else both

    def scale_grad(self) -> None:
        """What Opacus does last before the step, in one process."""
        super().scale_grad()  # type: ignore[misc]
        self._noised = self._grads()

    def reduce_gradients(self) -> None:
        """The same in several: the sum over all of them."""
        self._check_unchanged(self._noised or [])
        super().reduce_gradients()  # type: ignore[misc]
        self._noised = self._grads()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[misc]

    def stand_before_original(self) -> None:
        """Check each step of the optimizer inside, behind its other hooks."""
        hooks = self.original_optimizer._optimizer_step_pre_hooks
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), _Checked):  # of an earlier make_private
                del hooks[key]
        self._hook = self.original_optimizer.register_step_pre_hook(self._check_original)

    def _check_original(self, *_: Any) -> None:
        """Raise where somebody calls the step of the optimizer inside, or changed what it is to step with."""
        noised, self._noised = self._noised, None
        if noised is None:
            raise UnaccountedGrad(
                "the optimizer that make_private was given steps by itself, without noise and without being counted",
                advice="Step the optimizer that make_private returned last.",
            )
        self._check_unchanged(noised)

    def _check_unchanged(self, noised: list[tuple[Tensor | None, int]]) -> None:
        found = self._grads()
        if len(found) == len(noised) and all(a is b and n == m for (a, n), (b, m) in zip(found, noised, strict=True)):
            return
        self._noised = None
        raise UnaccountedGrad(
            "p.grad was changed between the noise and the step, by a hook of the optimizer (register_step_pre_hook, "
            "attach_step_hook) or of all (register_optimizer_step_pre_hook)",
            advice=f"Remove the hook: what it writes has no noise, and nobody counts it. {CLEAR}",
        )

    def _grads(self) -> list[tuple[Tensor | None, int]]:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return [(grad, 0 if grad is None else grad._version) for grad in grads]

    def _check_sums(self) -> None:
        """The parts of a logical batch are sums over the same parameters, as this optimizer left them."""
        if not self._is_last_step_skipped and any(p.__dict__["summed_grad"] is not None for p in self.params):
            raise UnaccountedGrad(
                "p.summed_grad holds something that no virtual step has left", advice="Call optimizer.zero_grad()."
            )
        if self._is_last_step_skipped and self._sums() != self._left:
            self._broken = True
            raise UnaccountedGrad(
                "p.summed_grad is not what the virtual steps of this batch left: it or max_grad_norm was changed, or "
                "parameters were frozen, unfrozen or added between them",
                advice="Change these between logical batches. optimizer.zero_grad() drops what is left of this one.",
            )

    def _sums(self) -> Any:
        sums = {id(p): getattr(p, "summed_grad", None) for p in self.params}
        states = {key: None if total is None else (total._cdata, total._version) for key, total in sums.items()}
        return str(getattr(self, "max_grad_norms", self.max_grad_norm)), states

    def zero_grad(self, set_to_none: bool = False) -> None:
        if self._broken:
            self._is_last_step_skipped = self._broken = False
        super().zero_grad(set_to_none)  # type: ignore[misc]
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in every:  # Opacus leaves those of frozen ones, which may be unfrozen
            if not parameter.requires_grad:
                parameter.grad_sample = None
                if not self._is_last_step_skipped:
                    parameter.summed_grad = None
        self.ledger.cleared(every)


def _of_the_inner(name: str) -> Any:
    """Opacus's optimizers have places for hooks of their own, and call none of them."""

    def register(self: _Checked, *args: Any, **arguments: Any) -> Any:
        return getattr(self.original_optimizer, name)(*args, **arguments)

    register.__name__ = name
    return register


for _of in ("step", "state_dict", "load_state_dict"):
    for _when in ("pre", "post"):
        setattr(_Checked, f"register_{_of}_{_when}_hook", _of_the_inner(f"register_{_of}_{_when}_hook"))


class _OneBackward(_Checked):
    """What both optimizers do with p.grad, which is a sum of clipped gradients."""

    attach_step_hook: Any

    def __init__(self, *args: Any, ledger: Ledger, poisson_sampling: bool = True, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.ledger, self.poisson_sampling = ledger, poisson_sampling
        self.clipped_to = self.max_grad_norm
        self._iterations = 1
        ledger.cleared(())

    @property
    def accumulated_iterations(self) -> int:
        """The backwards since the last step: the accountant's rate and the mean are over all of them."""
        return self._iterations

    def accumulate(self) -> None:
        """p.grad -> p.summed_grad, and no p.grad is left that a forgotten zero_grad() would add twice."""
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
    """Opacus's DPOptimizerFastGradientClipping behind `fxgrad.ClippedGrad`; `make_private` makes it.

    Its step is ``p.grad = (p.grad + σ C N(0, 1)) / E``, in p's units, with E the expected batch size (1 where
    ``loss_reduction="sum"``). Before anything moves it raises `fxgrad.errors.UnaccountedGrad` unless p.grad of every
    parameter is what the backward of the private model delivered since the last step, and unless its parameters are
    the model's trainable ones, over which the norm is taken; AlreadySet where several batches have been added under
    Poisson sampling; and OptionError where max_grad_norm is no longer that of the backward.
    """


class DistributedOneBackwardOptimizer(_OneBackward, DistributedDPOptimizerFastGradientClipping):  # type: ignore[misc]
    """The same in every process: the sum over the processes, with the noise of one.

    p.grad is this process's own part: `make_private` turns off what DistributedDataParallel averages in a backward. The
    step adds up the parts of all processes.
    """


def one_backward(made: DPOptimizer, engine: Engine, poisson_sampling: bool) -> DPOptimizer:
    """The optimizer Opacus made for grad_sample as one for clipped gradients, with its accountant's hook."""
    kinds = {DPOptimizer: OneBackwardOptimizer, DistributedDPOptimizer: DistributedOneBackwardOptimizer}
    return remade(made, kinds[type(made)], ledger=Ledger(engine, "grad"), poisson_sampling=poisson_sampling)


def checked(made: DPOptimizer, engine: Engine) -> DPOptimizer:
    """Opacus's own optimizer for p.grad_sample, which compares with the ledger before each step."""
    made.ledger = Ledger(engine, "grad_sample")
    kind: Any = type(made)
    made.__class__ = _checked_kind(kind)
    return made


@cache
def _checked_kind(kind: Any) -> Any:
    return type(kind.__name__, (_Checked, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
