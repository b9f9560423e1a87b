"""C++ in front of the kernels that Inductor writes for CPU: what ATen's vectors lack."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from fxgrad.host.patches import set_meanwhile
from fxgrad.host.versions import at_least

_FIRST_LINE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_CONVERTS = "at::vec::convert<double,2,float,1>", "at::vec::convert<float,1,double,2>"
_HEADERS = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vec"
_TEXT: ContextVar[str] = ContextVar("_TEXT", default="")


@functools.lru_cache(maxsize=1)
def converts_through_memory() -> bool:
    """Return whether ATen's vectors have no conversion of their own between float32 and float64.

    Why: one that PyTorch adds some day may not be defined twice.
    Since: torch 2.13, tested; an older one is left as it is.
    Without: no kernel compiles once there is one.
    """
    if not at_least("2.13"):
        return False
    headers = [path.read_text(encoding="utf-8") for path in _HEADERS.rglob("*convert*.h")]
    return bool(headers) and not any("VecConvert<double, 2, float, 1" in text for text in headers)


def in_front(text: str) -> AbstractContextManager[object]:
    """Let the kernels that this thread writes meanwhile begin with a text, if they convert between float32 and float64.

    Why: norms and what bounds their rounding are summed in float64, and the kernels of a backward do little else.
    Since: torch 2.13, as `converts_through_memory`: where that is false, there is no text.
    Without: the same numbers; networks with norm layers take up to a tenth longer.
    """
    if not text:
        return contextlib.nullcontext()
    _write_in_front()
    return set_meanwhile(_TEXT, text)


@functools.lru_cache(maxsize=1)
def _write_in_front() -> None:
    """Let Inductor's kernels ask for the text, once."""
    from torch._inductor.codegen.cpp import KernelGroup

    inductors = KernelGroup.codegen_group

    def codegen_group(self: Any, *args: Any, **kwargs: Any) -> str:
        code: str = inductors(self, *args, **kwargs)
        text = _TEXT.get()
        if text and any(conversion in code for conversion in _CONVERTS):
            code = code.replace(_FIRST_LINE, _FIRST_LINE + text, 1)
        return code

    KernelGroup.codegen_group = codegen_group  # type: ignore[method-assign]
