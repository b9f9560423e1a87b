"""Memory for the results of operators: on huge pages, and kept for the next step.

Per-sample gradients are hundreds of megabytes that a step writes once, into memory the process has never
touched. On CPU the time then goes into page faults, one for every 4 KiB; asked for in time, the kernel
gives 2 MiB at once.

Note [Memory that is kept]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The C library of Linux gives the top of its heap back to the system where more than twice the largest block that was
ever freed is free there, up to twice 32 MiB. A step whose largest value has 4 MB loses by that what the next one
needs: fifty layers of 300 units had 2,000 page faults a step, and took 1.54 times the plain step's time where they
take 1.31. So one block of nearly 32 MiB is asked for and freed, untouched, before the first step. Who sets the
thresholds, or has another allocator, keeps what he has. Blocks above 32 MiB are mapped, and given back at once
(mallopt(3)): we keep those of our own results ourselves (blocks.py).

Note [What is stored]
~~~~~~~~~~~~~~~~~~~~~
A compiler that fuses loops computes a value of few reads again wherever it is read. A sample's weight is read for
each of its positions: one root, two quotients and a rounding for every 16 numbers of a factor, a third of the time
that an MLP's backward spent beside its products. Of a value that is viewed by its strides, it needs the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from fxgrad.kernels.blocks import HUGE, Blocks, keeps, on_huge_pages

HEAP = (32 << 20) - (64 << 10)  # bytes: the largest block that the C library learns from, with what it adds
blocks = Blocks()


def fresh(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised memory of this shape, in ``like``'s dtype and on its device."""
    nbytes = prod(shape) * like.element_size()
    if like.device.type != "cpu" or nbytes < 2 * HUGE:
        return like.new_empty(tuple(shape))
    if nbytes > HEAP and keeps():
        return blocks.take(like.dtype, shape)
    return on_huge_pages(like.new_empty(tuple(shape)))


def stored(value: Tensor) -> Tensor:
    """Return the same dense tensor, computed once: see Note [What is stored]."""
    return value.as_strided(value.shape, value.stride())


@lru_cache(maxsize=1)
def keep_memory() -> None:
    """See Note [Memory that is kept]."""
    torch.empty(HEAP, dtype=torch.uint8, device="cpu")


def empty_cache() -> None:
    """Return memory on CPU that is kept for the next step's results, as ``torch.cuda.empty_cache`` does on CUDA.

    Under Linux a result of more than 32 MiB lies in memory that fxgrad uses again once the result is deleted. Until
    then the system may take it whenever memory is short, so this function is for limits on a process's addresses and
    for tools that count what a process has. A block that lay idle for a minute is returned with the next such result
    anyway.

    >>> empty_cache()
    """
    blocks.release()
