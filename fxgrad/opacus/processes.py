"""Distributed training of one model: all processes take every step, and one of them adds the noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fxgrad.errors import OptionError
from fxgrad.first_batch.check import FirstBatch

WRAPPERS = (DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel)

# Note [One communication for each step]
# Under Poisson sampling each process draws another number of samples, so the numbers of physical batches differ. A
# collective is therefore possible once in each logical step. There, Opacus's optimizers sum the clipped sums of all
# processes. fxgrad turns off the averaging of DistributedDataParallel, so a backward communicates nothing. A process
# that draws no samples takes the step with an empty batch.

BITS = 62
"""The size of a seed. PyTorch's generators of the CPU use its low 32 bits, those of CUDA all."""


def seed_at(seed: int, place: int, places: int) -> int:
    """Return a seed whose low bits are a place: seeds of different places differ, also in their low 32 bits."""
    bits = (places - 1).bit_length()
    return seed >> bits << bits | place


def processes() -> int:
    """Return the number of processes; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_processes(wrapper: nn.Module | None, independent: bool, clipping: Any) -> None:
    """Raise if several processes would train one model without a wrapper, or in a way that Opacus does not support."""
    if wrapper is None:
        if not independent:
            check_one_process()
        return
    if independent:
        raise OptionError(
            f"independent=True, and the model is in {type(wrapper).__name__}, which trains one model in all processes",
            advice="Leave out independent=True, or pass the model itself.",
        )
    if clipping != "flat":
        raise OptionError(
            f"clipping={clipping!r}, and the model is in {type(wrapper).__name__}: that is supported in one process",
            advice="Pass clipping='flat', or train in one process.",
        )
    if getattr(wrapper, "static_graph", False):
        raise OptionError(
            "DistributedDataParallel(static_graph=True) averages in every backward, and a private step adds up the "
            "parts of all processes itself",
            advice="Leave out static_graph=True.",
        )
    size = wrapper.process_group.size() if isinstance(wrapper, DistributedDataParallel) else processes()
    if size != processes():
        raise OptionError(
            f"the model is distributed over {size} of {processes()} processes, and Opacus's optimizer adds up the "
            "gradients of all",
            advice="Put the model into DistributedDataParallel without process_group=.",
        )


def check_one_process() -> None:
    """Raise if several processes train, each a model without a wrapper."""
    count = processes()
    if count > 1:
        raise OptionError(
            f"{count} processes train, and the model is not wrapped: each would draw from all samples and add noise "
            "of its own, so their parameters would differ and the accountant would count too little",
            advice="Pass make_private the wrapped model, module=DistributedDataParallel(model), not the other way "
            "round; or independent=True, where each process trains a model of its own.",
        )


def communicate_in_steps(
    wrapper: nn.Module, loader: DataLoader[Any], optimizer: DPOptimizer, first_batch: FirstBatch | None
) -> None:
    """Make a wrapped model's processes communicate only in steps, and take equally many steps.

    See Note [One communication for each step].
    """
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.require_backward_grad_sync = False  # as in no_sync()
    draw_every_batch(loader)
    if first_batch is not None:
        first_batch.settles = True
        optimizer.first_batch = first_batch


def draw_every_batch(loader: DataLoader[Any]) -> None:
    """Make the processes of a loader with Opacus's distributed sampler take equally many steps."""
    if isinstance(loader.batch_sampler, DistributedUniformWithReplacementSampler):
        loader.batch_sampler.__class__ = EveryBatch  # a DataLoader refuses a new sampler


class EveryBatch(DistributedUniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus's distributed Poisson sampler, without its omission of empty batches.

    Opacus's sampler omits a batch if this process's part is empty. The processes then take different numbers of steps,
    and wait for each other at the end.

    Without a generator, Opacus's sampler draws from the process's default one. After one `torch.manual_seed` in all
    processes, they would draw the same places of their parts, so samples would not be drawn independently. Here each
    process draws from a stream of its own, which one draw of the default generator and the rank determine.
    """

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.total_size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            order = torch.randperm(self.total_size, generator=generator)
        indices = order[self.rank : self.total_size : self.num_replicas]
        own = self.generator
        if own is None:
            own = torch.Generator().manual_seed(seed_at(int(torch.randint(2**BITS, ())), self.rank, self.num_replicas))
        for _ in range(self.num_batches):
            drawn = torch.rand(self.num_samples, generator=own) < self.sample_rate
            yield indices[drawn.nonzero(as_tuple=False).reshape(-1)].tolist()
