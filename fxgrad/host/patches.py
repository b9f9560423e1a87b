"""Settings of a thread, such as patches of PyTorch ask for that stay and do nothing else where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def set_meanwhile(setting: ContextVar[Any], value: _T) -> Iterator[_T]:
    """Let this thread have a setting meanwhile, and what it had before again.

    Why: a patch for each graph would be undone in another order than it was made in where two threads compile.
    Without: such a patch would need a lock for as long as a graph is compiled.
    """
    token = setting.set(value)
    try:
        yield value
    finally:
        setting.reset(token)
