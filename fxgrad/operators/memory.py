"""What operators read, in whatever layout, and memory for what they write: on huge pages, and not given back.

Per-sample gradients are hundreds of megabytes that a step writes once, into memory the process has never
touched. On CPU the time then goes into page faults, one for every 4 KiB; asked for in time, the kernel
gives 2 MiB at once.

Note [Memory that is kept]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The C library of Linux gives the top of its heap back to the system where more than twice the largest block that was
ever freed is free there, up to twice 32 MiB; blocks above it are mapped, and given back at once (mallopt(3)). A step
whose largest value has 4 MB loses by that what the next one needs: fifty layers of 300 units had 2,000 page faults a
step, and took 1.54 times the plain step's time where they take 1.31. So one block of nearly 32 MiB is asked for and
freed, untouched, before the first step. Who sets the thresholds, or has another allocator, keeps what he has.

Note [What is stored]
~~~~~~~~~~~~~~~~~~~~~
A compiler that fuses loops computes a value of few reads again wherever it is read. A sample's weight is read for
each of its positions: one root, two quotients and a rounding for every 16 numbers of a factor, a third of the time
that an MLP's backward spent beside its products. Of a value that is viewed by its strides, it needs the memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

# Operators take values as they lie: where a compiler has a convolution's channels last, copying a few samples at a time
# will do.
ANY_LAYOUT = (torch.Tag.flexible_layout,)
HUGE = 2 << 20  # bytes of a huge page
_MADV_HUGEPAGE = 14
_LEARNT = (32 << 20) - (64 << 10)  # bytes: the largest block that the C library learns from, with what it adds


def fresh(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised memory of this shape, in ``like``'s dtype and on its device."""
    out = like.new_empty(tuple(shape))
    nbytes = out.numel() * out.element_size()
    if out.device.type == "cpu" and nbytes >= 2 * HUGE:
        start = -(-out.data_ptr() // HUGE) * HUGE
        end = (out.data_ptr() + nbytes) // HUGE * HUGE
        advise = _madvise()
        if advise is not None and end > start:
            advise(start, end - start, _MADV_HUGEPAGE)  # a hint: a failure changes nothing
    return out


def stored(value: Tensor) -> Tensor:
    """The same dense tensor, computed once: see Note [What is stored]."""
    return value.as_strided(value.shape, value.stride())


@lru_cache(maxsize=1)
def keep_memory() -> None:
    """See Note [Memory that is kept]."""
    torch.empty(_LEARNT, dtype=torch.uint8, device="cpu")


@lru_cache(maxsize=1)
def _madvise() -> Callable[..., int] | None:
    """The C library's madvise, where there is one."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
