"""Large blocks of memory on CPU, reused once the results in them are deleted.

The C library maps a block above 32 MiB anew whenever one is asked for (mallopt(3)), and the system clears every page
of it while it is written: a step that keeps two gradients of 33 MB spent more time there than on their products.
PyTorch keeps such blocks on CUDA, not on CPU.

A block is on loan while any tensor has its storage: a view, a ``grad_sample`` that the user keeps. When the last one
dies the block is idle, and marked free (madvise(2), MADV_FREE): when memory is short, the system takes it
before anything else; only a limit on addresses (RLIMIT_AS) counts it. Where the system has no such call, nothing is
kept. Idle blocks are let go of when none fits what is asked for, and after a minute, at the next that is asked for.
The storage of a tensor in a block cannot be resized.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, prod
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

SPARE = 1.25  # how many times what is asked for a block may have: batches vary in size
HUGE = 2 << 20  # bytes of a huge page
_PATIENCE = 60.0  # seconds
_MADV_FREE, _MADV_HUGEPAGE = 8, 14


class Idle(NamedTuple):
    """A block without a result in it, and since when."""

    block: Tensor
    since: float


class Blocks:
    """The idle blocks, by address. Threads may take and give back at once: every change is one of a dict's own."""

    def __init__(self) -> None:
        self._idle: dict[int, Idle] = {}

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Uninitialised memory of this shape."""
        numel = prod(shape)
        block = self._fitting(numel * dtype.itemsize)
        if block is None:
            self.release()
            block = on_huge_pages(torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device="cpu"))
        loan = (ctypes.c_char * len(block)).from_address(block.data_ptr())
        weakref.finalize(loan, self._back, block).atexit = False
        return torch.frombuffer(loan, dtype=dtype, count=numel).resize_(tuple(shape))

    def release(self, before: float = inf) -> None:
        """Let go of every block that is idle since before then."""
        for address, idle in list(self._idle.items()):  # a copy: other threads change it
            if idle.since < before:
                self._idle.pop(address, None)

    def idle(self) -> int:
        """Bytes that lie idle."""
        return sum(len(idle.block) for idle in list(self._idle.values()))

    def _fitting(self, nbytes: int) -> Tensor | None:
        """Return the smallest idle block that fits, of several the last one used; it is idle no more."""
        self.release(before=monotonic() - _PATIENCE)
        for idle in sorted(self._idle.values(), key=lambda idle: (len(idle.block), -idle.since)):
            address, size = idle.block.data_ptr(), len(idle.block)
            if nbytes <= size <= SPARE * nbytes and self._idle.pop(address, None) is not None:
                return idle.block
        return None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the last holder may die where Dynamo looks on
    def _back(self, block: Tensor) -> None:
        if _advise(block, _MADV_FREE):
            self._idle[block.data_ptr()] = Idle(block, monotonic())


def keeps() -> bool:
    """Return whether blocks can be kept here."""
    return _madvise() is not None


def on_huge_pages(block: Tensor) -> Tensor:
    """Return the same tensor, not written yet: the system is asked for huge pages when it is. A hint, no more."""
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
    """Return the C library's madvise, where there is one."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
