"""A model without FSDP2's hooks and classes, for a call: modules are what they were before ``fully_shard``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.host import fsdp
from fxgrad.host.fsdp import State
from fxgrad.host.modules import FSDP_MANAGED
from fxgrad.host.pytree import tree_map


def unit_of(module: nn.Module) -> State | None:
    """Return the unit whose hooks a module has."""
    before, _ = fsdp.forward_hooks(module)
    return next((state for hook in before.values() if (state := fsdp.state_of(hook)) is not None), None)


@contextlib.contextmanager
def ordinary(model: nn.Module) -> Iterator[None]:
    """Let modules be of their own classes, without FSDP2's hooks and marks: Dynamo traces and guards such modules."""
    undo: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            own = module.__dict__
            if own.pop(FSDP_MANAGED, False):
                undo.append(partial(own.__setitem__, FSDP_MANAGED, True))
            kind = type(module)
            plain = fsdp.class_of(kind)
            if plain is not kind:
                undo.append(partial(setattr, module, "__class__", kind))
                module.__class__ = plain
            state = unit_of(module)
            if state is not None:
                dtypes = fsdp.precision(state) if module is not model else (None, None)
                for hooks, cast in zip(
                    fsdp.forward_hooks(module), (_before(dtypes[0]), _after(dtypes[1])), strict=True
                ):
                    undo.append(replace_hooks(hooks, lambda hook: fsdp.state_of(hook) is not None, cast))
        yield
    finally:
        for act in reversed(undo):
            act()


def replace_hooks(
    hooks: dict[int, Any], are_theirs: Callable[[Any], bool], ours: Callable[..., Any] | None
) -> Callable[[], None]:
    """Put a hook, or nothing, in the place of each of some hooks; returns what puts these back."""
    before = dict(hooks)
    replaced = {key: ours if are_theirs(hook) else hook for key, hook in before.items()}
    during = {key: hook for key, hook in replaced.items() if hook is not None}
    hooks.clear()
    hooks.update(during)

    def put_back() -> None:
        added = {key: hook for key, hook in hooks.items() if key not in during}
        removed = during.keys() - hooks.keys()
        hooks.clear()
        hooks.update({key: hook for key, hook in before.items() if key not in removed} | added)

    return put_back


@functools.cache
def _before(dtype: torch.dtype | None) -> Callable[..., Any] | None:
    """Return a hook that casts a unit's inputs; one object for a dtype, as Dynamo guards on it."""
    if dtype is None:
        return None
    return lambda module, args, kwargs: (_cast(dtype, args), _cast(dtype, kwargs))


@functools.cache
def _after(dtype: torch.dtype | None) -> Callable[..., Any] | None:
    """Return a hook that casts what a unit returns."""
    if dtype is None:
        return None
    return lambda module, args, outputs: _cast(dtype, outputs)


def is_cast(hook: Any) -> bool:
    """Return whether a hook stands in the place of FSDP2's."""
    return getattr(hook, "__module__", "") == __name__


def _cast(dtype: torch.dtype | None, values: Any) -> Any:
    """Cast the floating-point tensors among values."""
    if dtype is None:
        return values
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values)
