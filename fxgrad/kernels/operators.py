"""Opaque operators: PyTorch's tracers see one node, and of its results nothing but what they are like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

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
    """Make a function the operator ``fxgrad::name`` that writes to none of its arguments.

    ``fake`` gets the operator's arguments, by position, and returns what its results are like. ``backward`` is the
    operator's own, from what ``keep`` saved.
    """

    def make(function: Callable[P, T]) -> Callable[P, T]:
        name = f"fxgrad::{function.__name__.removeprefix('_')}"
        made = torch.library.custom_op(name, mutates_args=(), tags=tags)(function)
        made.register_fake(fake)
        if backward is not None:
            made.register_autograd(backward, setup_context=keep)
        return cast("Callable[P, T]", made)

    return make
