"""Opaque operators: PyTorch's tracers see one node, and of its results nothing but what they are like.

`torch.library.custom_op` makes those that have a gradient. A call of one takes 40 us, as long as many a kernel: the
others are registered with the dispatcher itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from fxgrad.host.dynamo import as_it_is

# Operators take values as they lie: where a compiler has a convolution's channels last, copying a few samples at a time
# will do.
ANY_LAYOUT = (torch.Tag.flexible_layout,)

P = ParamSpec("P")
T = TypeVar("T")


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
        name = f"fxgrad::{function.__name__.removeprefix('_')}"
        if backward is None:
            return cast("Callable[P, T]", _without_gradient(name, function, fake, tags))
        made = torch.library.custom_op(name, mutates_args=(), tags=tags)(function)
        made.register_fake(fake)
        made.register_autograd(backward, setup_context=keep)
        return cast("Callable[P, T]", made)

    return make


def _without_gradient(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag]
) -> Any:
    @as_it_is
    def call(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        if torch.is_grad_enabled() and _is_differentiable(results) and _requires_grad((*args, *kwargs.values())):
            raise NotImplementedError(f"{name} has no gradient: it is for what runs inside of autograd functions")
        return results

    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.impl(name, "default", call)
    torch.library.register_fake(name, fake)
    return getattr(torch.ops.fxgrad, name.removeprefix("fxgrad::")).default


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_requires_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


def _is_differentiable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_differentiable, value))
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
