"""The compiler behind fxgrad, by the name the user gave."""

from __future__ import annotations

from fxgrad.capture.options import Inner
from fxgrad.compile import inductor
from fxgrad.errors import OptionError
from fxgrad.host.inductor import aot_eager


def inner_compiler(backend: str | Inner) -> Inner:
    """The compiler behind: Inductor, AOTAutograd alone, nothing, or the user's own."""
    if callable(backend):
        return backend
    if backend == "inductor":
        return inductor.compile_fx
    if backend == "aot_eager":
        return aot_eager()
    if backend == "eager":
        return lambda gm, example_inputs: gm.forward
    raise OptionError(f"backend has to be 'inductor', 'aot_eager', 'eager' or a callable, not {backend!r}")
