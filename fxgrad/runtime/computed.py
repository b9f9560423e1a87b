"""Deliver what a graph with its backward in it has computed: as a backward would, or at once.

A backward calls the hooks on parameters, tells those who follow backwards, and adds to what is in p.grad. Where there
is none of that, its result is known: p.grad is what was computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.host.autograd import held_by_others, run_backward
from fxgrad.host.dynamo import as_it_is
from fxgrad.host.tensors import hooks_of, post_accumulate_hooks
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.placeholders import Placeholders
from fxgrad.runtime.slot import grad_of
from fxgrad.runtime.store import Store

number_of_no_backward = partial(next, itertools.count(-2, -1))
"""A number, used once, in place of a backward call's where there is none; the engine's are not negative."""


def stepped(store: Store, forward: Forward, outputs: Any) -> Any:
    """Deliver what the graph of a whole step has computed, and return what the step returns."""
    several = isinstance(outputs, tuple) and bool(outputs)
    loss = outputs[0] if several else outputs
    if forward.computed is not None and loss is forward.computed.loss:
        deliver_computed(store, forward)
        return outputs
    if forward.size or not isinstance(loss, Tensor):
        raise OptionError(
            "what loss_fn returned is not the loss that its graph computed",
            advice="Return the loss, or a tuple that begins with it: no number, and nothing made of it.",
        )
    if loss.requires_grad:
        try:
            loss.backward()  # of no samples, which no graph computes
        finally:
            forward.placeholders.clear()  # as in `deliver_computed`
    return (loss.detach(), *outputs[1:]) if several else loss.detach()


def deliver_computed(store: Store, forward: Forward) -> None:
    """Deliver what `forward_backward` has computed."""
    assert forward.computed is not None
    names, grads = forward.computed.names, forward.computed.grads
    parameters = forward.parameters if names == forward.names else {name: forward.parameters[name] for name in names}
    tensors = [*parameters.values()]
    if _is_all(store, forward, grads) and nothing_follows(store, names, tensors):
        forward.stands_for = number_of_no_backward()
        _set(tensors, store.deliver(grads, forward, names, None))
        store.results.replaced.clear()
        return
    root = Computed.of(store, forward, names, tensors)
    store.began(forward, root.grad_fn)
    del grads
    try:
        run_backward((root,), (root.new_empty(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    finally:
        forward.placeholders.clear()  # nodes that hold the forward, and parameters


class Computed(Placeholders):
    """parameters -> the root of a backward that computes nothing: it delivers what the forward's graph has computed."""

    _fxgrad_delivers = True

    @staticmethod
    def forward(ctx: Any, store: Store, forward: Forward, names: tuple[str, ...], *parameters: Tensor) -> Any:
        ctx.store, ctx.of, ctx.names = store, forward, names
        return parameters[0].new_empty(())

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        store, forward = ctx.store, ctx.of
        store.begin_backward(forward)
        names, grads = forward.computed.names, forward.computed.grads
        forward.computed = forward.computed._replace(grads=())  # autograd keeps without a copy what nobody else holds
        return (None, None, None, *store.deliver(grads, forward, names, ctx))


def _is_all(store: Store, forward: Forward, grads: Sequence[Tensor | None]) -> bool:
    """Return whether this is all that a backward would deliver, and to no one else."""
    if forward.enclosing != -1 or forward.averaged or forward.units is not None or forward.at_backward:
        return False
    if store.exchanges or store.observers or store.reports is not None:
        return False
    assert forward.computed is not None
    return forward.computed.names == forward.names and not any(map(is_, grads, repeat(None)))


def nothing_follows(store: Store, names: tuple[str, ...], parameters: list[Tensor]) -> bool:
    """Return whether p.grad is None everywhere, and no hook would see what arrives but the guard's own."""
    if any(map(is_not, map(grad_of, parameters), repeat(None))) or any(map(post_accumulate_hooks, parameters)):
        return False
    guard = store.guard
    alone = not any(map(hooks_of, parameters)) if guard is None else guard.is_alone(names, parameters)
    return alone and not held_by_others(parameters)


def _set(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Set p.grad, in the layout of the parameter and in memory of its own."""
    memories: set[int] = set()
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is None:
            continue
        memory = grad.data_ptr()
        if grad.stride() != parameter.stride() or memory in memories:
            grad = torch.empty_like(parameter, dtype=grad.dtype, requires_grad=False).copy_(grad)
        memories.add(memory)
        parameter.grad = grad
