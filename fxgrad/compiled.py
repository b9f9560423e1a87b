"""Kernels in C++, compiled by Inductor's own machinery (its compiler, flags, cache), and how much they copy at once."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxgrad.precision import accumulating

Types = Sequence[Any]  # of a function's arguments, as ctypes has them

LARGEST = 64 << 20  # bytes of a sample's inputs that a thread may copy
COPIED = 4 << 20  # bytes of a sample's gradients that it copies at once, about
TOGETHER = 8  # outputs whose sums are in registers at once


class Library:
    """The functions of some files, one behind the other, for values of some dtypes on CPU; they return nothing."""

    def __init__(
        self, sources: Sequence[Path], functions: Mapping[str, Types], dtypes: Sequence[torch.dtype] = (torch.float32,)
    ) -> None:
        self._sources, self._functions, self._dtypes = sources, functions, dtypes

    def takes(self, *values: Tensor) -> bool:
        """Whether the functions are made for such values."""
        dtypes = {value.dtype for value in values}
        return len(dtypes) == 1 and dtypes.issubset(self._dtypes) and values[0].device.type == "cpu"

    def start(self, like: Tensor) -> None:
        """Begin to compile, if they are made for such values, because what is traced now will call them.

        In another thread, while PyTorch goes on tracing: a compiler takes seconds, and is asked about vectors first.
        """
        if like.device.type == "cpu" and accumulating(like.dtype) in self._dtypes:
            _ = self._compiled

    @cached_property
    def functions(self) -> ctypes.CDLL | None:
        """None where nothing compiles C++, or where Inductor's interface is another one."""
        return self._compiled.result()

    @cached_property
    def _compiled(self) -> Future[ctypes.CDLL | None]:
        """By a thread of its own: those of a pool would be missing after a fork."""
        with contextlib.suppress(ImportError):
            import torch._inductor.codecache  # here: two threads that import it at once may find half of it
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="fxgrad").submit(self._compile)

    def _compile(self) -> ctypes.CDLL | None:
        try:
            from torch._inductor.codecache import CppCodeCache

            text = "\n".join(source.read_text(encoding="utf-8") for source in self._sources)
            found: ctypes.CDLL = CppCodeCache.load(text)
            for name, types in self._functions.items():
                function = getattr(found, name)
                function.argtypes, function.restype = list(types), None
        except (ImportError, AttributeError, TypeError, OSError, RuntimeError):
            return None
        return found


def parts_of(samples: int, outputs: int, nbytes: int, threads: int) -> int:
    """How many parts of a sample's outputs are computed by themselves, for so many bytes of a sample's gradients.

    More than one where there are more threads than samples, and where a thread's copy would be large.
    """
    return min(max(-(-threads // samples), -(-nbytes // COPIED)), -(-outputs // TOGETHER))
