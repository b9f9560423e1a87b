"""Opaque operators: PyTorch's tracers see one node, and of its results nothing but what they are like.

`torch.library.custom_op` makes those that have a gradient. A call of one takes 40 us, as long as many a kernel: the
others are registered with the dispatcher itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from fxgrad.host.dispatch import BELOW_AUTOGRAD, BELOW_VIEWS, DEVICES, any_mode, is_profiled
from fxgrad.host.dynamo import as_it_is

# Operators take values as they lie: where a compiler has a convolution's channels last, copying a few samples at a time
# will do.
ANY_LAYOUT = (torch.Tag.flexible_layout,)
_COMPILED = (torch.Tag.pt2_compliant_tag,)  # they have what a compiler asks for

P = ParamSpec("P")
T = TypeVar("T")

BODIES: dict[Any, Callable[..., Any]] = {}  # by operator: the function that it was made of
DIRECT: dict[str, str] = {}  # as Inductor names an operator's call: what does the same past the dispatcher
looks_on: Callable[[str, Any, Any], None] | None = None  # gets name, arguments and results of each call: for tests


def operator(
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function the operator ``fxgrad::name`` that writes to none of its arguments, and returns none of them.

    ``fake`` gets the operator's arguments, by position, and returns what its results are like. ``backward`` is the
    operator's own, from what ``keep`` saved.
    """

    def make(function: Callable[P, T]) -> Callable[P, T]:
        name = function.__name__.removeprefix("_")
        if backward is None:
            made = _without_gradient(name, function, fake, tags)
        else:
            made = torch.library.custom_op(f"fxgrad::{name}", mutates_args=(), tags=tags)(function)
            made.register_fake(fake)
            made.register_autograd(backward, setup_context=keep)
        BODIES[getattr(torch.ops.fxgrad, name).default] = function
        return cast("Callable[P, T]", made)

    return make


_LIBRARY = torch.library.Library("fxgrad", "FRAGMENT")


def _without_gradient(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag]
) -> Any:
    """Define an operator with one kernel for all devices, which stands at the key of autograd, too."""
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(*_COMPILED, *tags))
    op: Any = getattr(torch.ops.fxgrad, name).default

    @as_it_is
    def call(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        if looks_on is not None:
            looks_on(name, (args, kwargs), results)
        return results

    @as_it_is
    def call_or_refuse(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if (keys & BELOW_VIEWS).highestPriorityTypeId() in DEVICES:  # nothing comes in between
            results = call(*args, **kwargs)
        else:
            results = op.redispatch(keys & BELOW_AUTOGRAD, *args, **kwargs)
        if torch.is_grad_enabled() and _is_differentiable(results) and _requires_grad((*args, *kwargs.values())):
            raise NotImplementedError(f"fxgrad::{name} has no gradient: autograd functions call it")
        return results

    @as_it_is
    def direct(*args: Any, **kwargs: Any) -> Any:
        """For Inductor's code, whose tensors have no gradients: past the dispatcher, where nobody looks on there."""
        return (op if any_mode() or is_profiled() else call)(*args, **kwargs)

    op.direct = direct
    DIRECT[f"torch.ops.{op}"] = f"torch.ops.{op}.direct"
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, call_or_refuse, "Autograd", with_keyset=True)
    torch.library.register_fake(f"fxgrad::{name}", fake)
    return op


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_requires_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


def _is_differentiable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_differentiable, value))
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
