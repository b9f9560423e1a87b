"""The generic rule's operator: per sample, the vjp of any op, behind one node of the compiled graph.

functorch's batching rules turn a symbolic batch into a number for many ops, so the vmap runs at run time,
on concrete sizes. A loop over the samples takes over where vmap cannot or says something else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fxgrad.host.dispatch import with_autograd

Values = list[Any]  # the operands of one sample's call, in its order
OwnVjp = Callable[[Values, Sequence[Tensor]], Sequence[Tensor]]  # (values, grads of the outputs) -> of the parameters


@dataclass(frozen=True)
class SampleProgram:
    """One sample's call of an op on ``values``, of which the operator takes three lists.

    ``batched``, ``shared`` and ``numbers`` are the positions in ``values`` of tensors with samples, of other tensors
    and of integers. Other numbers come in tensors, at ``scalars``, a part of ``shared``. ``own_vjp`` is the vjp by the
    parameters, where that is not autograd's to decide.
    """

    words: str  # the computation in words; no other one of this process has the same
    call: Callable[[Values], tuple[Tensor, ...]]
    batched: tuple[int, ...]
    shared: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    own_vjp: OwnVjp | None = None
    scalars: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Return the whole computation: equal keys are one entry of the table."""
        scalars = f" scalars={list(self.scalars)}" if self.scalars else ""
        return f"{self.words} shared={list(self.shared)} numbers={list(self.numbers)}{scalars}"

    def values(self, batched: Sequence[Tensor], shared: Sequence[Tensor], numbers: Sequence[int]) -> Values:
        """Return the operands in the call's order."""
        positions = (*self.batched, *self.shared, *self.numbers)
        at: dict[int, Any] = dict(zip(positions, (*batched, *shared, *numbers), strict=True))
        return [at[i].item() if i in self.scalars else at[i] for i in range(len(at))]

    def enter(self) -> None:
        """Let the operator find this program, also when it runs in a graph that PyTorch's caches kept."""
        _PROGRAMS[self.key] = self

    def vjp(self, values: Values, wrt: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        """Differentiate every sample's call by ``values[i], i in wrt``, through the operator."""
        self.enter()
        batched, shared, numbers = ([values[i] for i in at] for at in (self.batched, self.shared, self.numbers))
        by = [self.shared.index(i) for i in wrt]
        rows = [g.contiguous() for g in grads]
        by_parameter: list[Tensor] = per_sample_vjp(self.key, rows, batched, shared, by, numbers)
        return by_parameter

    def of_sample(
        self,
        batched: Sequence[Tensor],
        shared: Sequence[Tensor],
        numbers: Sequence[int],
        wrt: Sequence[int],
        grads: Sequence[Tensor],
        differentiate: Callable[..., Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        """Return the vjp of one sample's call by ``shared[i], i in wrt``; ``differentiate`` is autograd's vjp."""
        values = self.values(batched, shared, numbers)
        if self.own_vjp is not None:
            return self.own_vjp(values, grads)

        def of_weights(*weights: Tensor) -> tuple[Tensor, ...]:
            filled = list(values)
            for i, weight in zip(wrt, weights, strict=True):
                filled[self.shared[i]] = weight
            return self.call(filled)

        return differentiate(of_weights, [shared[i] for i in wrt], grads)


# A program cannot be an op's argument: its key is. The key names the computation in full, so that a compiled artefact
# that PyTorch's caches keep for another process finds the same computation there, and compiling the same model again
# adds nothing. Two functions of one name have keys of their own (`ops.op_name`), by the order in which a process met
# them: so a cached artefact is found only by a graph that has the same keys.
_PROGRAMS: dict[str, SampleProgram] = {}


def _plain_vjp(
    call: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the vjp by plain autograd: not every custom op that has a backward has one for torch.func."""
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
    """Return the states of the random generators that an op on this device may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(value.device)] if value.is_cuda else states


def _functional_vjp(
    call: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the vjp that vmap can look into."""
    by_weight: Sequence[Tensor] = vjp(call, *weights)[1](tuple(grads))
    return by_weight


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

    def alone(i: int) -> Sequence[Tensor]:
        rows, of_outputs = [t[i].detach() for t in batched], [g[i] for g in grads]
        return program.of_sample(rows, shared, sizes, wrt, of_outputs, _plain_vjp)

    def one(of_outputs: tuple[Tensor, ...], *rows: Tensor) -> Sequence[Tensor]:
        return program.of_sample(rows, shared, sizes, wrt, of_outputs, _functional_vjp)

    before = _random_states(grads[0])
    try:
        with warnings.catch_warnings():  # an op that vmap itself loops over is slow, not wrong
            warnings.simplefilter("ignore")
            by_weight = vmap(one)(tuple(grads), *batched)
        right = all(_close([grad[i] for grad in by_weight], alone(i)) for i in {0, n - 1})
    except (RuntimeError, NotImplementedError):  # an op without a batching rule
        right = False
    if not right:  # one sample at a time
        by_weight = tuple(torch.stack(tuple(column)) for column in zip(*map(alone, range(n)), strict=True))
    after = _random_states(grads[0])
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise RuntimeError(
            f"an op that uses a parameter draws random numbers, which no backward can repeat: {program.words}"
        )
    return [grad.to_dense().clone(memory_format=torch.contiguous_format) for grad in by_weight]


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
