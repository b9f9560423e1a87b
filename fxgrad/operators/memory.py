"""What operators read, in whatever layout, and fresh memory for large results, on huge pages where the system has them.

Per-sample gradients are hundreds of megabytes that a step writes once, into memory the process has never
touched. On CPU the time then goes into page faults, one for every 4 KiB; asked for in time, the kernel
gives 2 MiB at once.
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


@lru_cache(maxsize=1)
def _madvise() -> Callable[..., int] | None:
    """The C library's madvise, where there is one."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
