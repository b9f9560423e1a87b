"""The step of Opacus's optimizers with a check against the ledger; no other step may move a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import opacus
import torch
import torch.distributed as dist
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor
from torch.utils.data import DataLoader

from fxgrad.errors import OptionError, UnaccountedGrad
from fxgrad.first_batch.check import FirstBatch
from fxgrad.host.modules import own_step_hooks, step_pre_hooks
from fxgrad.host.tensors import identity, version
from fxgrad.opacus.checkpoints import check_order
from fxgrad.opacus.ledger import CLEAR, Ledger, numbers_of, state_of
from fxgrad.opacus.processes import check_one_process
from fxgrad.opacus.signals import Part, Signals
from fxgrad.runtime.grad_scaler import check_no_scaler_steps

# Note [Copies of an optimizer]
# Opacus's optimizers do not call Optimizer.__init__. copy.deepcopy and pickle end in Optimizer.__setstate__, which
# wraps the `step` of the class in a function that reads the hooks made by __init__. From then on the step of every
# optimizer of that class and its subclasses fails. So fxgrad sets these hooks on each of its optimizers.


class CheckedStep(DPOptimizer):  # type: ignore[misc]
    """A base of optimizers, before one of Opacus's, that checks p.grad against the ledger before each step."""

    ledger: Ledger
    signals: Signals
    accountant: Any = None  # the one that counts the steps
    loader: Callable[[], DataLoader[Any] | None] = staticmethod(lambda: None)  # the one returned with this optimizer
    step_hook: Any  # Opacus's own
    in_one_process: bool  # whether to refuse other processes, which torch.distributed may start later
    first_batch: FirstBatch | None = None  # until the processes have agreed on their first batches
    _noised: list[tuple[Tensor | None, Any]] | None = None  # p.grad after the noise, before the step
    _left: Any = None  # the sums left by virtual steps of this logical batch
    _refused = False  # whether the last step raised
    _part: Part | None = None  # the signal of the step in progress

    def pre_step(self, closure: Any = None) -> Any:
        check_no_scaler_steps()
        if self.in_one_process:
            check_one_process()
        self._part = self.signals.part(self._is_last_step_skipped)
        if self.first_batch is not None and not self._check_skip_next_step(pop_next=False):
            settled = self.first_batch.settle(dist.group.WORLD, self.params[0].device)
            self.first_batch = None if settled else self.first_batch
        self.ledger.check(self.param_groups)
        for parameter in self.params:  # a parameter unfrozen since has no such attribute
            parameter.__dict__.setdefault("summed_grad", None)
            _check_processed_flag(parameter.__dict__["summed_grad"])  # before any addition to it
        self._check_sums()
        real = super().pre_step(closure)
        for parameter in self.params if real else ():  # Opacus marks them only in the process that adds noise
            _mark_as_processed(parameter.__dict__["summed_grad"])
        self.signals.took(self._part)
        self._left = self._sums()
        if real:
            step_pre_hooks(self.original_optimizer).move_to_end(self._hook.id)
        return real

    def attach_step_hook(self, fn: Callable[..., Any]) -> None:
        """Add a step hook and keep that of the accountant."""
        counts: Any = self.step_hook

        def both(optimizer: Any) -> None:
            counts(optimizer)
            fn(optimizer)

        self.step_hook = fn if counts is None else both

    def scale_grad(self) -> None:
        """Scale as Opacus does, and record p.grad; in one process, this is its last change before the step."""
        super().scale_grad()
        self._noised = self._grads()

    def reduce_gradients(self) -> None:
        """Sum over the processes as Opacus does, and record p.grad."""
        self._check_unchanged(self._noised or [])
        super().reduce_gradients()
        self._noised = self._grads()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        try:
            taken = super().step(closure)
        except BaseException:
            self._refused = True
            raise
        finally:
            self._part = None
        self._refused = False
        return taken

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announce whether the step for the next part of a logical batch is a virtual one; see `Signals`."""
        super().signal_skip_step(do_skip)
        self._step_skip_queue: list[bool] = []  # Opacus's, which no step reads
        if self.signals.add(do_skip) and self._is_last_step_skipped and self.signals.summed is not None:
            self._refused = True  # the loop before was left in the middle of a logical batch
            self.zero_grad(set_to_none=True)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return self._part is not None and self._part.skip

    def start_over(self) -> None:
        """Drop gradients, what virtual steps have left, and all signals."""
        self.signals.clear()
        self._refused = True
        self.zero_grad()

    def remember(self, engine: opacus.PrivacyEngine, loader: DataLoader[Any]) -> None:
        """Record the engine that counts the steps, and the loader that make_private returns with this optimizer."""
        self.accountant, self.loader = engine.accountant, weakref.ref(loader)
        _OF.setdefault(engine, weakref.WeakSet()).add(self)

    def begin_checks(self, ledger: Ledger) -> None:
        """Check each step against the ledger, last by a pre-hook of the original optimizer's step."""
        self.ledger, self.signals = ledger, Signals()
        own_step_hooks(self)  # see Note [Copies of an optimizer]
        hooks = step_pre_hooks(self.original_optimizer)
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), CheckedStep):  # from an earlier make_private
                del hooks[key]
        self._hook = self.original_optimizer.register_step_pre_hook(self._check_original)

    def load_state_dict(self, state_dict: Any) -> None:
        check_order(self.original_optimizer, state_dict)
        super().load_state_dict(state_dict)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise OptionError(
            "a private optimizer cannot be copied: the copy would step copies of the parameters, which no model has",
            advice="Save optimizer.state_dict(), and load it into the optimizer that make_private returns for the "
            "copied model.",
        )

    def _check_original(self, *_: Any) -> None:
        """Raise if the user calls the original optimizer's step, or if p.grad changed after the noise."""
        noised, self._noised = self._noised, None
        if noised is None:
            raise UnaccountedGrad(
                "the optimizer that make_private was given steps by itself, without noise and without being counted",
                advice="Step the optimizer that make_private returned last.",
            )
        self._check_unchanged(noised)

    def _check_unchanged(self, noised: list[tuple[Tensor | None, Any]]) -> None:
        grads = self._grads()
        if len(grads) == len(noised) and all(a is b and n == m for (a, n), (b, m) in zip(grads, noised, strict=True)):
            return
        self._noised = None
        raise UnaccountedGrad(
            "p.grad was changed between the noise and the step, by a hook of the optimizer (register_step_pre_hook, "
            "attach_step_hook) or of all (register_optimizer_step_pre_hook)",
            advice=f"Remove the hook: what it writes has no noise, and nobody counts it. {CLEAR}",
        )

    def _grads(self) -> list[tuple[Tensor | None, Any]]:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return [(grad, () if grad is None else state_of(grad)) for grad in grads]

    def _check_sums(self) -> None:
        """Raise if the sums of a logical batch's parts were changed since this optimizer's last virtual step."""
        if not self._is_last_step_skipped and any(p.__dict__["summed_grad"] is not None for p in self.params):
            raise UnaccountedGrad(
                "p.summed_grad holds something that no virtual step has left", advice="Call optimizer.zero_grad()."
            )
        if self._is_last_step_skipped and self._sums() != self._left:
            raise UnaccountedGrad(
                "p.summed_grad is not what the virtual steps of this batch left: it or max_grad_norm was changed, or "
                "parameters were frozen, unfrozen or added between them",
                advice="Change these between logical batches. optimizer.zero_grad() drops what is left of this one.",
            )

    def _sums(self) -> Any:
        sums = {id(p): getattr(p, "summed_grad", None) for p in self.params}
        states = {key: None if total is None else (identity(total), version(total)) for key, total in sums.items()}
        bounds: Any = getattr(self, "max_grad_norms", self.max_grad_norm)
        return numbers_of(bounds), states

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients as Opacus does; after a step that raised, drop what virtual steps have left, too."""
        if self._refused:
            self._is_last_step_skipped = self._refused = False
            self.signals.give_up()
        super().zero_grad(set_to_none)
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in every:  # Opacus skips frozen parameters, which may be unfrozen later
            if not parameter.requires_grad:
                parameter.grad_sample = None
                if not self._is_last_step_skipped:
                    parameter.summed_grad = None
        self.ledger.cleared(every)


for _of in ("step", "state_dict", "load_state_dict"):  # Opacus's optimizers never call hooks of their own
    for _when in ("pre", "post"):
        _name = f"register_{_of}_{_when}_hook"
        setattr(CheckedStep, _name, property(attrgetter(f"original_optimizer.{_name}")))


_OF: weakref.WeakKeyDictionary[opacus.PrivacyEngine, weakref.WeakSet[CheckedStep]] = weakref.WeakKeyDictionary()


def optimizers_of(engine: opacus.PrivacyEngine) -> list[CheckedStep]:
    """Return the private optimizers whose steps an engine counts."""
    return [*_OF.get(engine, ())]
