"""AOTAutograd's cache of compiled graphs: what it takes, and how it finds a call target again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def count_as_known(node: fx.Node, key: str) -> None:
    """Let AOTAutograd's cache take a call of a function that it does not know.

    Why: it stores no graph with one, unless ``torch.fx.wrap`` marked the call and the user gave it a hash.
    Since: needed and tested on torch 2.13.
    Without: a process that compiles a graph again traces and lowers all of it again.
    """
    node.meta["is_wrapped"] = True
    node.meta["user_cache_hash"] = key


@contextlib.contextmanager
def found_as(target: Any, name: str) -> Iterator[None]:
    """Let a call target be an attribute of its module meanwhile, under a name that no other target has.

    Why: AOTAutograd's key names each call target by an import, and looks whether that gives the same object.
    Since: needed and tested on torch 2.13.
    Without: as `count_as_known`.
    """
    module = sys.modules.get(target.__module__)
    if module is None:  # a graph with it is not stored
        yield
        return
    inherited = "__qualname__" not in vars(target) and not isinstance(target, FunctionType)
    before, target.__qualname__ = getattr(target, "__qualname__", ""), name
    setattr(module, name, target)
    try:
        yield
    finally:
        delattr(module, name)
        target.__qualname__ = before
        if inherited:
            del target.__qualname__


def around_the_trace() -> list[str]:
    """Return what of the caller's may change a trace without a mark in the graph: modes, and hooks that are graphs.

    Why: AOTAutograd's key has neither; a mode may replace each op, and such hooks become part of the graph.
    Since: torch 2.13, tested.
    Without: a graph that was traced in a mode could be found outside of it.
    """
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    names = [f"the mode {type(mode).__name__}" for mode in modes if not isinstance(mode, DeviceContext)]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) or ()
    return names + ["saved_tensors_hooks that are graphs" for hook in hooks if isinstance(hook, fx.GraphModule)][:1]


def ranges_and_guards(sizes: Iterable[Any]) -> list[str]:
    """Return what is known of symbolic sizes: their ranges, and the guards on them so far.

    Why: they decide branches of a trace without a new guard.
    Since: torch 2.13, tested.
    Without: a graph that was compiled under other guards could be found for these sizes.
    """
    nodes = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    if not nodes:
        return []
    env = nodes[0].shape_env
    symbols = sorted({symbol for node in nodes for symbol in node.expr.free_symbols}, key=str)
    return [*(f"{symbol} {env.var_to_range.get(symbol)}" for symbol in symbols), *(str(one.expr) for one in env.guards)]
