"""Warn once in a process of an optimizer whose step moves nothing: grad_sample is set, and p.grad is None.

Both hooks look at p.grad of one parameter where there is a gradient, read no values, and end with the warning.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fxgrad.host.tensors import version

_WRAPPED = "original_optimizer"  # what an optimizer of Opacus's steps, once it has filled p.grad
_places: set[str] = set()  # attributes that quantities set instead of p.grad
_handles: list[Any] = []
_versions: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()  # of the parameters, in a step
_warned = False


def watch_steps(places: frozenset[str]) -> None:
    """Look at the steps of all optimizers from here on, where a quantity sets these attributes and no p.grad."""
    _places.update(places)
    if not _handles and not _warned:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


def forget() -> None:
    """Look at no step any more, as before the first `watch_steps` of a process."""
    global _warned
    _warned = False
    _places.clear()
    _remove()


def _remove() -> None:
    while _handles:
        _handles.pop().remove()


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _has_grad(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(optimizer))


def _versions_of(optimizer: Optimizer) -> list[int]:
    return [version(parameter) for parameter in _parameters(optimizer) if not parameter.is_inference()]


def _before(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or _has_grad(optimizer) or hasattr(optimizer, _WRAPPED):
        return
    _versions[optimizer] = _versions_of(optimizer)


def _after(optimizer: Optimizer, *_: Any) -> None:
    """Warn where p.grad is still None, and no parameter was written to."""
    if torch.compiler.is_compiling():
        return
    versions = _versions.pop(optimizer, None)
    if versions is None or _has_grad(optimizer) or versions != _versions_of(optimizer):
        return
    place = next((at for p in _parameters(optimizer) for at in _places if getattr(p, at, None) is not None), None)
    if place is not None:
        global _warned
        _warned = True
        _remove()
        warnings.warn(
            f"{type(optimizer).__name__}.step() moved nothing: p.grad of its parameters is None, and p.{place} is set\n"
            "  Ask for the ordinary gradient, too, with quantity=[fxgrad.Grad(), ..], or for fxgrad.ClippedGrad; or "
            "set p.grad before the step.",
            stacklevel=3,
        )
