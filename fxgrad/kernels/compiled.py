"""Kernels in C++, compiled by Inductor's own machinery (its compiler, flags, cache), and how much they copy at once."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxgrad.host.conversions import converts_through_memory
from fxgrad.host.inductor import find_vectors, import_toolchain, load_library
from fxgrad.host.patches import set_meanwhile
from fxgrad.kernels.precision import accumulating

log = logging.getLogger(__name__)

LARGEST = 64 << 20  # bytes of a sample's inputs that a thread may copy
COPIED = 4 << 20  # bytes of a sample's gradients that it copies at once, about
TOGETHER = 8  # outputs whose sums are in registers at once

T = TypeVar("T")
_FAILURES = (ImportError, AttributeError, TypeError, OSError, RuntimeError)  # no compiler, or another interface


_FOLDER = Path(__file__).parent
_EXPORTED = re.compile(r'extern "C" (\w+) (\w+)\(([^)]*)\)')
_NUMBERS = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "double": ctypes.c_double}


class Library:
    """The functions of some files, one behind the other, for values of some dtypes on CPU.

    The files declare the functions' arguments and results. ``computes`` is their use, in the user's words: without a
    compiler PyTorch's ops compute it.
    """

    def __init__(self, *sources: str, dtypes: Sequence[torch.dtype] = (torch.float32,), computes: str) -> None:
        self.sources, self.dtypes, self.computes = sources, dtypes, computes
        self._warned = False

    @property
    def text(self) -> str:
        """The files, one behind the other."""
        return "\n".join([conversions(), *map(_read, self.sources)])

    def applies(self, *values: Tensor, copied: int = 0) -> bool:
        """Whether the functions can compute with these values, of each of which a thread copies so many bytes."""
        fits = copied <= LARGEST and all(value.numel() for value in values)
        return self.takes(*values) and fits and self.functions is not None

    def call(self, name: str, *arguments: Any, threads: int | None = None) -> Any:
        """Call a function where `applies` allows it; its last argument is the number of threads."""
        return getattr(self.functions, name)(*map(_in_c, arguments), threads or torch.get_num_threads())

    def takes(self, *values: Tensor) -> bool:
        """Return whether the functions are made for such values: their memory holds what they are, not its negative."""
        dtypes = {value.dtype for value in values}
        known = len(dtypes) == 1 and dtypes.issubset(self.dtypes) and values[0].device.type == "cpu"
        return known and not any(map(Tensor.is_neg, values))

    def start(self, like: Tensor) -> None:
        """Begin to compile, if they are made for such values, because what is traced now will call them.

        In another thread, while PyTorch goes on tracing: a compiler takes seconds, and is asked about vectors first.
        """
        if like.device.type == "cpu" and accumulating(like.dtype) in self.dtypes:
            _ = self._compiled
            asked = _ASKED.get()
            if asked is not None and self not in asked:
                asked.append(self)

    @cached_property
    def functions(self) -> ctypes.CDLL | None:
        """None where nothing compiles C++, or where Inductor's interface is another one: then with a warning, once."""
        reason = self.why_off()
        if not reason:
            return self._compiled.result()
        if not self._warned:  # here, in the thread of the user's call; a filter may make it an error, once
            self._warned = True
            warnings.warn(_OFF.format(computes=self.computes, reason=reason), RuntimeWarning, stacklevel=2)
        return None

    def why_off(self) -> str:
        """What the compiler or PyTorch said against these functions; empty where they are compiled. This waits."""
        error = self._compiled.exception()  # raised here, it would keep the callers' frames, and their tensors, alive
        if error is not None and not isinstance(error, _FAILURES):
            raise error
        return "" if error is None else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    @cached_property
    def _compiled(self) -> Future[ctypes.CDLL]:
        vectors = ask_about_vectors()
        return _in_a_thread(lambda: self._compile(vectors))

    def _compile(self, vectors: Future[None]) -> ctypes.CDLL:
        vectors.result()
        start, text = time.perf_counter(), self.text
        library = load_library(text)
        for result, name, arguments in _EXPORTED.findall(text):
            function = getattr(library, name)
            function.argtypes = [_type_of(argument) for argument in arguments.split(",")]
            function.restype = _NUMBERS.get(result)
        log.info("compiled the kernels of %s in %.2f s, beside", self.computes, time.perf_counter() - start)
        return library


def conversions() -> str:
    """Return what ATen's vectors lack."""
    return _read("doubles.cpp") if converts_through_memory() else ""


def _read(source: str) -> str:
    return (_FOLDER / source).read_text(encoding="utf-8")


def _type_of(argument: str) -> Any:
    """``const float* g``: an address; ``int64_t n``: a number."""
    return ctypes.c_void_p if "*" in argument else _NUMBERS[argument.split()[0]]


def _in_c(argument: Any) -> Any:
    """Return a tensor as its address, sizes as an array; numbers and None as they are."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return (ctypes.c_int64 * len(argument))(*argument) if isinstance(argument, tuple) else argument


_OFF = (
    "fxgrad computes {computes} without its kernels in C++, which takes longer: {reason}. Install a C++ compiler, or "
    "name another one in the environment variable CXX."
)
_ASKED: ContextVar[list[Library] | None] = ContextVar("_ASKED", default=None)


def libraries_asked() -> AbstractContextManager[list[Library]]:
    """Collect the libraries whose functions are called by what is traced meanwhile, in this thread."""
    return set_meanwhile(_ASKED, [])


@lru_cache(maxsize=1)
def ask_about_vectors() -> Future[None]:
    """Let a thread ask the compiler which vectors it knows: that takes seconds, for each who asks at the same time."""
    return _in_a_thread(_find_vectors)


def _find_vectors() -> None:
    with contextlib.suppress(*_FAILURES):
        find_vectors()


def _in_a_thread(run: Callable[[], T]) -> Future[T]:
    """In one of its own, with this one's settings of Inductor: those of a pool would be missing after a fork."""
    with contextlib.suppress(ImportError):
        import_toolchain()  # here: two threads at once may import half of it
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="fxgrad").submit(copy_context().run, run)


def parts_of(samples: int, outputs: int, nbytes: int) -> int:
    """How many parts of a sample's outputs are computed by themselves, for so many bytes of a sample's gradients.

    More than one where there are more threads than samples, and where a thread's copy would be large.
    """
    return min(max(-(-torch.get_num_threads() // samples), -(-nbytes // COPIED)), -(-outputs // TOGETHER))
