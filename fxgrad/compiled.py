"""Kernels in C++, compiled by Inductor's own machinery (its compiler, flags, cache), and how much they copy at once."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Types = Sequence[Any]  # of a function's arguments, as ctypes has them

LARGEST = 64 << 20  # bytes of a sample's inputs that a thread may copy
COPIED = 4 << 20  # bytes of a sample's gradients that it copies at once, about
TOGETHER = 8  # outputs whose sums are in registers at once


def library(sources: Sequence[Path], functions: Mapping[str, Types]) -> ctypes.CDLL | None:
    """The functions of some files, one behind the other; they return nothing.

    None where nothing compiles C++, or where Inductor's interface is another one.
    """
    try:
        from torch._inductor.codecache import CppCodeCache

        found: ctypes.CDLL = CppCodeCache.load("\n".join(source.read_text(encoding="utf-8") for source in sources))
        for name, types in functions.items():
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
