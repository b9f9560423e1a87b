"""The generic rule's operator: per sample, the vjp of any op, behind one node of the compiled graph.

functorch's batching rules turn a symbolic batch into a number for many ops, so the vmap runs at run time,
on concrete sizes. A loop over the samples takes over where vmap cannot or says something else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fxgrad.host.dispatch import with_autograd

# Closures cannot be op arguments. The key names what the closure computes, in full, so that a compiled
# artefact that PyTorch's caches keep for another process finds the same computation there.
_PROGRAMS: dict[str, Callable[..., Any]] = {}


_BACKWARDS: dict[str, Callable[..., Any]] = {}


def register_program(key: str, program: Callable[..., Any], backward: Callable[..., Any] | None = None) -> None:
    """Make ``program(batched, shared, sizes) -> outputs``, one sample's call, known under ``key``.

    ``backward(batched, shared, sizes, wrt, grads)`` is its vjp, where that is not autograd's to decide.
    """
    _PROGRAMS[key] = program
    if backward is not None:
        _BACKWARDS[key] = backward


def _plain_vjp(
    call: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The vjp by plain autograd: not every custom op that has a backward has one for torch.func."""
    with with_autograd(), torch.enable_grad():
        leaves = [weight.detach().requires_grad_() for weight in weights]
        pairs = [pair for pair in zip(call(*leaves), grads, strict=True) if pair[0].requires_grad]
        if not pairs:  # a branch that returns constants
            return [torch.zeros_like(weight) for weight in weights]
        outputs, of_outputs = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, leaves, of_outputs, materialize_grads=True)


def _close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether vmap says what the op alone says: some of its batching rules are wrong (roll of a 0-dim tensor)."""
    return all(torch.allclose(a, b, 1e-2, 1e-2, equal_nan=True) for a, b in zip(actual, expected, strict=True))


def _random_states(value: Tensor) -> list[Tensor]:
    """The states of the random generators that an op on this device may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(value.device)] if value.is_cuda else states


@torch.library.custom_op("fxgrad::per_sample_vjp", mutates_args=())
def per_sample_vjp(
    key: str,
    grads: Sequence[Tensor],
    batched: Sequence[Tensor],
    shared: Sequence[Tensor],
    wrt: Sequence[int],
    sizes: Sequence[int],
) -> list[Tensor]:
    """Per sample n: the gradient of ``<grads_n, program(batched_n, shared)>`` by ``shared[i], i in wrt``."""
    program = _PROGRAMS[key]
    n = grads[0].shape[0]
    if n == 0:
        return [shared[i].new_zeros(0, *shared[i].shape) for i in wrt]

    weights = [shared[i] for i in wrt]

    def sample(rows: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def call(*weights: Tensor) -> tuple[Tensor, ...]:
            values = list(shared)
            for i, weight in zip(wrt, weights, strict=True):
                values[i] = weight
            return program(rows, values, sizes)  # type: ignore[no-any-return]

        return call

    backward = _BACKWARDS.get(key)

    def alone(i: int) -> Sequence[Tensor]:
        rows, of_outputs = [t[i].detach() for t in batched], [g[i] for g in grads]
        if backward is not None:
            return backward(rows, shared, sizes, wrt, of_outputs)  # type: ignore[no-any-return]
        return _plain_vjp(sample(rows), weights, of_outputs)

    def one(of_outputs: tuple[Tensor, ...], *rows: Tensor) -> Sequence[Tensor]:
        if backward is not None:
            return backward(rows, shared, sizes, wrt, of_outputs)  # type: ignore[no-any-return]
        found: Sequence[Tensor] = vjp(sample(rows), *weights)[1](of_outputs)
        return found

    before = _random_states(grads[0])
    try:
        with warnings.catch_warnings():  # an op that vmap itself loops over is slow, not wrong
            warnings.simplefilter("ignore")
            found = vmap(one)(tuple(grads), *batched)
        right = all(_close([grad[i] for grad in found], alone(i)) for i in {0, n - 1})
    except (RuntimeError, NotImplementedError):  # an op without a batching rule
        right = False
    if not right:  # one sample at a time
        found = tuple(torch.stack(tuple(column)) for column in zip(*map(alone, range(n)), strict=True))
    after = _random_states(grads[0])
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise RuntimeError(f"an op that uses a parameter draws random numbers, which no backward can repeat: {key}")
    return [grad.to_dense().clone(memory_format=torch.contiguous_format) for grad in found]


@per_sample_vjp.register_fake
def _(
    key: str,
    grads: Sequence[Tensor],
    batched: Sequence[Tensor],
    shared: Sequence[Tensor],
    wrt: Sequence[int],
    sizes: Sequence[int],
) -> list[Tensor]:
    return [shared[i].new_empty(grads[0].shape[0], *shared[i].shape) for i in wrt]
