"""Large blocks of memory on CPU, handed out again once nobody holds what was written into them.

The C library maps a block above 32 MiB anew whenever one is asked for (mallopt(3)), and the system clears every page
of it while it is written: a step that keeps two gradients of 33 MB spent more time there than on their products.
PyTorch keeps such blocks on CUDA, not on CPU.

A block is on loan while any tensor has its storage: a view, a ``grad_sample`` that the user keeps. When the last one
dies the block is idle, and marked free (madvise(2), MADV_FREE): it costs nothing while nobody wants memory, and when
somebody does, the system takes it before anything else. Where the system cannot be told so, nothing is kept. What is
idle when no block fits is let go of, so that no more stays than steps of one shape use.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

SPARE = 1.25  # how many times what is asked for a block may have: batches vary in size
HUGE = 2 << 20  # bytes of a huge page
_MADV_FREE, _MADV_HUGEPAGE = 8, 14


class Blocks:
    """The idle blocks, by address. Threads may take and give back at once: every change is one of a dict's own."""

    def __init__(self) -> None:
        self._idle: dict[int, Tensor] = {}

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Uninitialised memory of this shape."""
        nbytes = prod(shape) * dtype.itemsize
        block = self._fitting(nbytes)
        if block is None:
            self.release()
            block = on_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        loan = (ctypes.c_char * nbytes).from_address(block.data_ptr())
        weakref.finalize(loan, self._back, block).atexit = False
        return torch.frombuffer(loan, dtype=dtype).resize_(tuple(shape))

    def release(self) -> None:
        """Let go of every idle block."""
        self._idle.clear()

    def idle(self) -> int:
        """Bytes that lie idle."""
        return sum(len(block) for block in list(self._idle.values()))

    def _fitting(self, nbytes: int) -> Tensor | None:
        """The smallest idle block that fits, which is then idle no more."""
        for block in sorted(list(self._idle.values()), key=len):
            if nbytes <= len(block) <= SPARE * nbytes and self._idle.pop(block.data_ptr(), None) is not None:
                return block
        return None

    def _back(self, block: Tensor) -> None:
        if _advise(block, _MADV_FREE):
            self._idle[block.data_ptr()] = block


def on_huge_pages(block: Tensor) -> Tensor:
    """The same tensor, not written yet: the system is asked for huge pages when it is. A hint, no more."""
    _advise(block, _MADV_HUGEPAGE)
    return block


def _advise(block: Tensor, advice: int) -> bool:
    """Tell the system how the huge pages inside of a block are used; whether it knows such advice."""
    start = -(-block.data_ptr() // HUGE) * HUGE
    end = (block.data_ptr() + block.numel() * block.element_size()) // HUGE * HUGE
    madvise = _madvise()
    return madvise is not None and end > start and madvise(start, end - start, advice) == 0


@lru_cache(maxsize=1)
def _madvise() -> Callable[..., int] | None:
    """The C library's madvise, where there is one."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
