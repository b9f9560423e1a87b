"""TorchDynamo's graphs of a function, looked up without the preparations to compile one."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._C._dynamo.eval_frame as of_frames
from torch._dynamo import eval_frame
from torch._guards import TracingContext

from fxgrad.host.versions import at_least


def run_found(compiled: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a compiled function where Dynamo has a graph for the arguments; where not, its own code runs, uncompiled.

    So the function has to raise in its first line where it is called for this. The state around a call has to be
    `is_usual`.

    Why: whoever calls a compiled function prepares Dynamo to compile it, by twenty-five questions, and most calls find
    their graph.
    Without: each step takes some 35 us longer. Without its guard, autocast that a failed forward entered stays on.
    """
    function: Callable[..., Any] = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    levels = torch._C._functorch.get_dynamic_layer_stack_depth()
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    before = of_frames.set_eval_frame(False)
    try:
        with torch._C._ForceDispatchKeyGuard(*keys):
            return function(*args, **kwargs)
    except BaseException:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(levels)
        raise
    finally:
        of_frames.set_eval_frame(before)


def is_usual(compiled: Callable[..., Any]) -> bool:
    """Return whether a call of a compiled function does nothing but run the graph that is found.

    Not so under a stance of torch.compile, while PyTorch traces (another compilation, `torch.jit.trace`), and where
    Dynamo is switched off.

    Why: as `run_found`.
    Without: as `run_found`.
    """
    stance = eval_frame._stance
    if stance.stance != "default" or stance.backend is not None or TracingContext.try_get() is not None:
        return False
    return not torch._C._is_tracing() and hasattr(compiled, "_torchdynamo_orig_callable")


class FoundGraph:
    """One graph of a compiled function: Dynamo's code that calls it, as a function, and the guards of that.

    Why: Dynamo finds it by hooks in the interpreter, behind switches that cost more than the guards themselves. The
    code may call nothing else that Dynamo compiled: it must be of a function without graph breaks.
    Since: torch 2.13, tested; none is returned in an older one.
    Without: a step of `forward_backward` that is like the one before it takes some 25 us longer.
    """

    def __init__(self, compiled: Callable[..., Any], entry: Any) -> None:
        function: types.FunctionType = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
        self.compiled, cells = compiled, function.__closure__ or ()
        self.original = function.__code__
        self.closure = {name: cell.cell_contents for name, cell in zip(self.original.co_freevars, cells, strict=True)}
        self.manager, self.check = entry.guard_manager, entry.guard_manager.root.check
        self.call = types.FunctionType(entry.code, function.__globals__, function.__name__, None, cells)

    @classmethod
    def of(cls, compiled: Callable[..., Any]) -> FoundGraph | None:
        """Return the graph that Dynamo tries first, of a function of ``(*args, **kwargs)``; None if it has none."""
        entries = of_frames._debug_get_cache_entry_list(compiled._torchdynamo_orig_callable.__code__)  # type: ignore[attr-defined]
        return cls(compiled, entries[0]) if entries and at_least("2.13") else None

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Return whether Dynamo would run this graph for a call."""
        entries = of_frames._debug_get_cache_entry_list(self.original)
        if not entries or entries[0].guard_manager is not self.manager:
            return False
        fits: bool = self.check({"args": args, "kwargs": {}, **self.closure})
        return fits
