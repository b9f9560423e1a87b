"""The classes of the optimizers that `make_private` returns: Opacus's own, with the checked step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor

from fxgrad.engine import Engine
from fxgrad.errors import AlreadySet, OptionError
from fxgrad.opacus.arguments import check_number
from fxgrad.opacus.checked_step import CheckedStep
from fxgrad.opacus.ledger import Ledger, numbers_of
from fxgrad.opacus.processes import processes
from fxgrad.opacus.shards import ShardNoise
from fxgrad.quantities import ClippedGrad

# Note [One C]
# The clipping and the noise have to use one C. Opacus's optimizer of `per_layer` has two, max_grad_norms for the
# clipping and max_grad_norm for the noise, and its schedulers write the second alone. So both are properties here, of
# one place: the bounds that the backward reads, or a list. A backward reads C as it begins. The step compares that with
# C at the step, which the noise is for.


class _Bounded(CheckedStep):
    """An optimizer whose max_grad_norm and max_grad_norms cannot disagree. See Note [One C]."""

    bounds: Sequence[float] | Tensor  # C of each group, or of all

    @property
    def max_grad_norms(self) -> list[float]:
        """Return C of each group; assign a list of as many."""
        return list(numbers_of(self.bounds))

    @max_grad_norms.setter
    def max_grad_norms(self, bounds: Sequence[float]) -> None:
        if len(bounds) != len(self.max_grad_norms):
            raise OptionError(
                f"max_grad_norms has {len(bounds)} numbers for {len(self.max_grad_norms)}",
                advice="Assign one number for each, as to make_private.",
            )
        for bound in bounds:  # adaptive clipping cuts Inf to its largest bound
            check_number("max_grad_norm", bound, infinite=True)
        if isinstance(self.bounds, Tensor):
            self.bounds.copy_(torch.tensor(list(bounds), dtype=torch.float64).reshape(self.bounds.shape))
        else:
            self.bounds = [*map(float, bounds)]

    @property
    def max_grad_norm(self) -> float:
        """Return the norm that no sample's part exceeds, which the noise is for."""
        bounds = self.max_grad_norms
        return math.hypot(*bounds) if len(bounds) > 1 else bounds[0]

    @max_grad_norm.setter
    def max_grad_norm(self, bound: float | Tensor) -> None:
        bound = float(bound)
        if bound == self.max_grad_norm:  # the first step of a scheduler
            return
        if len(self.max_grad_norms) > 1:
            raise OptionError(
                "clipping='per_layer' has several bounds, and max_grad_norm is their norm: with another one, the noise "
                "would not fit the clipping",
                advice="Assign optimizer.max_grad_norms, a number for each parameter.",
            )
        self.max_grad_norms = [bound]

    def pre_step(self, closure: Any = None) -> Any:
        for bound in self.max_grad_norms:  # the user may have written to the tensor
            check_number("max_grad_norm", bound)
        with _without_autocast(parameter.device.type for parameter in self.params):
            return super().pre_step(closure)


@contextmanager
def _without_autocast(devices: Iterable[str]) -> Iterator[None]:
    """Clip and add noise in the parameters' own precision, where the step is inside ``torch.autocast``."""
    with ExitStack() as stack:
        for device in {"cpu", *devices}:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class PerLayerOptimizer(_Bounded, DPPerLayerOptimizer):  # type: ignore[misc]
    """Opacus's DPPerLayerOptimizer with one C for clipping and noise; `make_private` makes it.

    ``max_grad_norms`` may be assigned between steps. ``max_grad_norm`` follows from it. Each bound belongs to one
    parameter, which may be frozen later. The noise is then still that of all bounds.
    """

    bounded: list[Tensor]  # the parameters of max_grad_norms, in its order

    def clip_and_accumulate(self) -> None:
        bounds = {id(parameter): bound for parameter, bound in zip(self.bounded, self.max_grad_norms, strict=True)}
        unbounded = [parameter for parameter in self.params if id(parameter) not in bounds]
        if unbounded:
            raise OptionError(
                f"a parameter of the optimizer, of shape {list(unbounded[0].shape)}, has no bound: "
                "clipping='per_layer' has one for each parameter that was trainable in make_private",
                advice="Let it be trainable in make_private, with a number of its own in max_grad_norm, and freeze it "
                "afterwards; or call make_private again.",
            )
        for parameter in self.params:  # Opacus pairs the bounds with the parameters that are trainable now
            _check_processed_flag(parameter.grad_sample)
            rows = self._get_flat_grad_sample(parameter).to(parameter.dtype)
            norms = rows.reshape(len(rows), parameter.numel()).norm(2, dim=1)
            weights = (bounds[id(parameter)] / (norms + 1e-6)).clamp(max=1.0)
            grad = torch.einsum("i,i...", weights, rows)
            parameter.summed_grad = grad if parameter.summed_grad is None else parameter.summed_grad.add_(grad)
            _mark_as_processed(parameter.grad_sample)


class _Adaptive(CheckedStep):
    """The share of unclipped samples is ``(count + σ_u N(0, 1)) / B``, over all parts of a batch.

    Opacus counts those of the last part. For an empty batch, B is the expected batch size, as for every batch in Andrew
    et al. (2019), https://arxiv.org/abs/1905.03871.
    """

    unclipped_num: Any
    sample_size: Any

    def zero_grad(self, set_to_none: bool = False) -> None:
        counts = self.sample_size, self.unclipped_num
        super().zero_grad(set_to_none)  # Opacus forgets them
        if self._is_last_step_skipped:
            self.sample_size, self.unclipped_num = counts

    def update_max_grad_norm(self) -> None:
        self.sample_size = self.sample_size or self.expected_batch_size
        super().update_max_grad_norm()


class AdaptiveOptimizer(_Adaptive, _Bounded, AdaClipDPOptimizer):  # type: ignore[misc]
    """Opacus's AdaClipDPOptimizer with support for empty batches; `make_private` makes it."""

    def clip_and_accumulate(self) -> None:
        rows = self._get_flat_grad_sample(self.params[0])
        if len(rows):
            super().clip_and_accumulate()
            return
        DPOptimizer.clip_and_accumulate(self)
        self.unclipped_num = self.unclipped_num + torch.zeros((), device=rows.device)


class _OneBackward(_Bounded):
    """The common base of optimizers for which p.grad is a sum of clipped gradients.

    Attributes:
        quantity: what the backward computes; ``fxgrad.result(model, optimizer.quantity)`` has norms and weights.
    """

    quantity: ClippedGrad
    poisson_sampling: bool
    _iterations = 1

    @property
    def accumulated_iterations(self) -> int:
        """Return the number of backwards since the last step; the accountant's rate and the mean cover all of them."""
        return self._iterations

    def accumulate(self) -> None:
        """Move p.grad to p.summed_grad, so that a forgotten zero_grad() cannot add it twice."""
        backwards = self.ledger.deliveries
        self._check_bounds()
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

    def _check_bounds(self) -> None:
        """Raise unless every backward has clipped to C, which the noise is for."""
        bounds = tuple(self.max_grad_norms)
        other = next((part.bounds for part in self.ledger.parts if part.bounds != bounds), None)
        if other is None:
            return
        now, then = (str(each[0] if len(each) == 1 else list(each)) for each in (bounds, other))
        advice = "Change it before the backward or after the step. optimizer.zero_grad() drops that backward."
        if not isinstance(self.bounds, Tensor):
            advice = "Give make_private the model itself, or transform it with max_grad_norm=torch.tensor(C)."
        raise OptionError(
            f"max_grad_norm is {now} and the backward clipped to {then}: the noise would not fit", advice=advice
        )


class OneBackwardOptimizer(_OneBackward, DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """Opacus's DPOptimizerFastGradientClipping for gradients of `fxgrad.ClippedGrad`; `make_private` makes it.

    Its step is ``p.grad = (p.grad + σ C N(0, 1)) / E``, in p's units, with E the expected batch size (1 for
    ``loss_reduction="sum"``). C may change between steps: assign ``max_grad_norm`` or, for ``clipping="per_layer"``,
    the list ``max_grad_norms``, or use a scheduler of Opacus. The next backward clips to it; nothing compiles again.

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


class AdaptiveOneBackwardOptimizer(
    _Adaptive,
    _OneBackward,
    AdaClipDPOptimizer,  # type: ignore[misc]
    DPOptimizerFastGradientClipping,  # type: ignore[misc]
):
    """`OneBackwardOptimizer` with the C of Opacus's AdaClipDPOptimizer: the backward says which samples it clipped."""

    def accumulate(self) -> None:
        parts = self.ledger.parts
        super().accumulate()
        for part in parts:
            self.sample_size += part.clipping.weight.numel()
            self.unclipped_num = self.unclipped_num + (part.clipping.weight >= 1).sum()


class _OfShards(DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """The sum and the noise of a model that FSDP2 divided."""

    ledger: Ledger
    noise: ShardNoise

    def signal_skip_step(self, do_skip: bool = True) -> None:
        raise OptionError(
            "BatchMemoryManager splits a batch into as many backwards as it has samples, and processes with sharded "
            "parameters have to meet in each backward",
            advice="Train without BatchMemoryManager: fxgrad.ClippedGrad stores no per-sample gradient. Choose a "
            "smaller batch_size of the loader if memory is short.",
        )

    def accumulate(self) -> None:
        """Set p.summed_grad to the sum over all processes, which FSDP2 has divided by their number."""
        for parameter in self.params:
            parameter.summed_grad = parameter.grad.detach() * self.noise.mesh.size()

    def add_noise(self) -> None:
        """Add to each element of this process's shards one draw; see `ShardNoise`."""
        units = self.ledger.engine.units
        assert units is not None
        trainable = [shard for shard in units.all_shards() if shard.requires_grad]
        sums = [shard.__dict__["summed_grad"] for shard in trainable]
        noised = self.noise.added(sums, self.noise_multiplier * self.max_grad_norm)
        for shard, grad in zip(trainable, noised, strict=True):
            shard.grad = grad

    def zero_grad(self, set_to_none: bool = False) -> None:
        units = self.ledger.engine.units
        assert units is not None
        for parameter in units.parameters():  # also what a backward that raised has left of whole gradients
            parameter.grad = None
        super().zero_grad(set_to_none)


class ShardedOneBackwardOptimizer(_OneBackward, _OfShards):
    """`OneBackwardOptimizer` for a model that FSDP2's ``fully_shard`` divided; `make_private` makes it.

    Each process steps its shards. The backward has reduced their gradients; the step multiplies FSDP2's average by the
    number of processes, adds the noise of its shards, and divides by the expected size of the batch of all processes.
    """


ONE_BACKWARD = {
    DPOptimizer: OneBackwardOptimizer,
    DistributedDPOptimizer: DistributedOneBackwardOptimizer,
    AdaClipDPOptimizer: AdaptiveOneBackwardOptimizer,
}
CHECKED = {AdaClipDPOptimizer: AdaptiveOptimizer, DPPerLayerOptimizer: PerLayerOptimizer}


def check_steps(
    private: DPOptimizer,
    engine: Engine,
    quantity: ClippedGrad | None,
    *,
    poisson_sampling: bool,
    noise: ShardNoise | None = None,
) -> None:
    """Turn Opacus's optimizer into one that checks p.grad, or p.grad_sample, against the ledger before each step.

    Opacus's classes share their attributes, so the object remains: its settings, its sums, and the accountant's hook.

    Args:
        private: Opacus's optimizer.
        engine: the model's.
        quantity: the one that clips in the backward, if it does.
        poisson_sampling: whether batches are drawn independently.
        noise: of the shards, where FSDP2 divided the model.
    """
    kind: Any = type(private)
    if noise is not None:
        _steps_shards(private, noise)
    else:
        private.__class__ = _checked_class(kind) if quantity is None else ONE_BACKWARD[kind]
    norm = private.__dict__.pop("max_grad_norm")  # properties take the place of Opacus's attributes
    bounds: Any = private.__dict__.pop("max_grad_norms", norm) if quantity is None else quantity.max_grad_norm
    private.bounds = bounds if isinstance(bounds, Tensor) else numbers_of(bounds)
    private.bounded = private.params
    if quantity is not None:
        private.quantity, private.poisson_sampling = quantity, poisson_sampling
    private.begin_checks(Ledger(engine, quantity))


def _steps_shards(private: DPOptimizer, noise: ShardNoise) -> None:
    """Turn Opacus's optimizer for several processes into one that steps shards."""
    assert type(private) is DistributedDPOptimizer, type(private)  # else Opacus has not divided the batch size
    private.__class__ = ShardedOneBackwardOptimizer
    private.expected_batch_size = round(private.expected_batch_size * processes())  # Opacus's is of one process
    private.noise, private.generator = noise, None


@cache
def _checked_class(kind: Any) -> Any:
    if kind in CHECKED:
        return CHECKED[kind]
    return type(kind.__name__, (_Bounded, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
