"""Gradient placeholders: they bring the results out of the compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.runtime.forward import Forward
from fxgrad.runtime.store import Store


class Placeholders(torch.autograd.Function):
    """parameters -> gradient placeholders; its backward stores what arrives, and hands on what is for p.grad."""

    _fxgrad_delivers = True

    @staticmethod
    def forward(  # with its context: without, PyTorch binds the arguments' names at every call
        ctx: Any, store: Store, forward: Forward, names: tuple[str, ...], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.of, ctx.names = store, forward, names
        ctx.set_materialize_grads(False)
        # New tensors, not views, each over one element of memory that no code reads.
        return tuple([placeholder.data for placeholder in store.asked_of(forward, names).placeholders])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, None, *ctx.store.deliver(grads, ctx.of, ctx.names, ctx))


class Unseen(torch.autograd.Function):
    """The parameters of a model run as it is, on no samples: there are no gradients to deliver."""

    _fxgrad_delivers = True

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters = len(parameters)
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None,) * ctx.parameters


def watch(outputs: Sequence[Tensor], store: Store, forward: Forward) -> None:
    """Check each backward call through these outputs before it computes anything; each node has one hook."""
    nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    if forward.watched is not None:
        nodes -= forward.watched
        forward.watched |= nodes
    for node in nodes:
        node.register_prehook(lambda grads: store.begin_backward(forward))
