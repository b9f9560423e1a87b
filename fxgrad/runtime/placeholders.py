"""Gradient placeholders: they bring the results out of the compiled graph."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fxgrad.host.dynamo import as_it_is
from fxgrad.host.functorch import innermost_transform, unwrap_if_dead
from fxgrad.host.pytree import tree_leaves
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.store import Store

_data = attrgetter("data")


class Placeholders(torch.autograd.Function):
    """parameters -> gradient placeholders; its backward stores what arrives, and hands on what is for p.grad."""

    _fxgrad_delivers = True

    @classmethod
    def of(cls, store: Store, forward: Forward, names: tuple[str, ...], parameters: Iterable[Tensor]) -> Any:
        """Return the placeholders: as `apply` does, without a Python frame for each parameter."""
        if innermost_transform() is not None:  # `apply` raises
            return cls.apply(store, forward, names, *parameters)  # type: ignore[no-untyped-call]
        above: Any = super(torch.autograd.Function, cls)  # `apply` in C++
        return above.apply(store, forward, names, *map(unwrap_if_dead, parameters))

    @staticmethod
    def forward(  # with its context: without, PyTorch binds the arguments' names at every call
        ctx: Any, store: Store, forward: Forward, names: tuple[str, ...], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.of, ctx.names = store, forward, names
        ctx.set_materialize_grads(False)
        # New tensors, not views, each over one element of memory that no code reads.
        return tuple(map(_data, store.asked_of(forward, names).placeholders))

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, None, *ctx.store.deliver(grads, ctx.of, ctx.names, ctx))


class Unseen(torch.autograd.Function):
    """The parameters of a model run as it is, on no samples: there are no gradients to deliver."""

    _fxgrad_delivers = True

    @staticmethod
    def forward(ctx: Any, forward: Forward, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.of, ctx.parameters = forward, len(parameters)
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.of.sums is not None:
            ctx.of.sums.zeros()
        return (None, *[None] * ctx.parameters)


def tensors_of(outputs: Any) -> list[Tensor]:
    """List the tensors in a model's outputs, dataclasses included."""
    tensors: list[Tensor] = []
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            tensors += tensors_of([getattr(leaf, name) for name in leaf.__dataclass_fields__])
    return tensors


def watch(outputs: Iterable[Any], store: Store, forward: Forward) -> None:
    """Check each backward call through these outputs before it computes anything; each node has one hook."""
    watched = set() if forward.watched is None else forward.watched
    for output in outputs:
        node = getattr(output, "grad_fn", None)
        if node is not None and node not in watched:
            watched.add(node)
            node.register_prehook(partial(_begin, store, forward))


@as_it_is
def _begin(store: Store, forward: Forward, grads: Any) -> None:
    store.begin_backward(forward)
