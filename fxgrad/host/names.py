"""The names by which Inductor's code calls what it has no code for itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from fxgrad.host.patches import set_meanwhile

_NAMES: ContextVar[Mapping[str, str]] = ContextVar("_NAMES", default={})  # noqa: B039, nobody writes to it


def called_as(names: Mapping[str, str]) -> AbstractContextManager[object]:
    """Let the code of the graphs that this thread compiles meanwhile call ops by names of functions.

    Why: the dispatcher takes 30 us to call an op that is written in Python, behind a large kernel; 7 where caches are
    warm.
    Without: the same numbers; a transformer of four layers, which calls 34 of them, takes a hundredth longer.
    """
    _ask_for_names()
    return set_meanwhile(_NAMES, names)


@functools.lru_cache(maxsize=1)
def _ask_for_names() -> None:
    """Let Inductor ask for the names, once."""
    from torch._inductor.ir import ExternKernel

    inductors = ExternKernel.get_kernel_name

    def get_kernel_name(self: Any) -> str:
        name: str = inductors(self)
        return _NAMES.get().get(name, name)

    ExternKernel.get_kernel_name = get_kernel_name  # type: ignore[method-assign]
