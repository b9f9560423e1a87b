"""Copies of a graph's inputs with two samples changed to, or towards, the values of a third."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxgrad.capture.shared_memory import apart, once


class Change(NamedTuple):
    """The samples to change, and the source sample of their new values."""

    samples: tuple[int, ...]
    source: int


@dataclass(frozen=True)
class BatchedInput:
    """An input with samples: position k of dimension ``dim`` belongs to sample ``owners[k]``."""

    value: Tensor
    dim: int
    owners: Tensor

    def sizes(self, samples: int) -> Tensor:
        """Return the largest magnitude in each sample."""
        rows = self.value.detach().movedim(self.dim, 0).reshape(len(self.owners), -1)
        rows = (rows if rows.is_complex() else rows.double()).abs().double()
        return rows.new_zeros(samples).scatter_reduce(0, self.owners, rows.amax(1), "amax")

    def put(self, made: Tensor, change: Change) -> bool:
        """Write the change into a copy of the value; return False if no number differs.

        A broadcast dimension (`expand`) is written once. Nothing is written if the samples alias the same memory, since
        a change of one sample would change all.
        """
        made, value = once(made, self.dim), once(self.value.detach(), self.dim)
        if not apart(made):
            return False
        source = (self.owners == change.source).nonzero().flatten()
        moved = False
        for sample in change.samples:
            places = (self.owners == sample).nonzero().flatten()
            old = value.index_select(self.dim, places)
            cycled = torch.arange(len(places), device=source.device) % len(source)
            other = value.index_select(self.dim, source[cycled])
            new = between(old, other)
            new = old * 0.9 if new is not other and torch.equal(new, old) else new
            made.index_copy_(self.dim, places, new)
            moved = moved or not torch.equal(old, new)
        return moved


def batched_inputs(
    args: Sequence[Any], size: int, dims: Mapping[int, int], packed: Mapping[int, tuple[int, int] | None]
) -> dict[int, BatchedInput]:
    """Return the inputs with samples by position; for a packed sequence, its data."""
    padded = {i: dim for i, dim in dims.items() if i not in packed}
    inputs = {i: BatchedInput(args[i], dim, torch.arange(size, device=args[i].device)) for i, dim in padded.items()}
    for i, places in packed.items():
        if places is not None:
            steps, order = args[places[0]].tolist(), args[places[1]]
            inputs[i] = BatchedInput(args[i], 0, torch.cat([order[:n] for n in steps]).to(args[i].device))
    return inputs


def chosen(inputs: Mapping[int, BatchedInput], size: int, count: int) -> Change:
    """Choose the samples with the largest and the smallest values, which a maximum, minimum or mean depends on."""
    known = [one for one in inputs.values() if one.value.numel()]
    if not known:
        return Change((), 0)
    deciding = next((one for one in known if one.value.is_floating_point()), known[0])
    order = deciding.sizes(size).argsort().tolist()
    return Change((order[-1], order[0])[:count], order[(size - 1) // 2])


def between(old: Tensor, other: Tensor) -> Tensor:
    """Return new values: floating ones between both samples', so in range; others are the other sample's."""
    if not (old.is_floating_point() or old.is_complex()) or old.element_size() == 1:
        return other
    new = old + 0.7 * (other - old)
    return torch.where(new.isfinite(), new, other)
