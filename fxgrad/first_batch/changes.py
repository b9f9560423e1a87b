"""Copies of a graph's inputs with two samples changed to, or towards, the values of a third."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxgrad.host.tensors import identity


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
        made, value = _once(made, self.dim), _once(self.value.detach(), self.dim)
        if not _apart(made):
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


def copies(args: Mapping[int, Tensor], written: frozenset[int]) -> dict[int, Tensor]:
    """Copy each tensor with its strides; those that share memory which the graph writes to share the copy's."""
    groups: dict[Any, dict[int, Tensor]] = {}
    shared = {_memory(args[i]) for i in written if i in args}
    for i, x in args.items():
        together = _plain(x) and _memory(x) in shared
        groups.setdefault(_memory(x) if together else i, {})[i] = x.detach()
    return {i: made for group in groups.values() for i, made in _copied(group).items()}


def _copied(group: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copy tensors into one memory, with the offsets and strides of the originals."""
    if not all(map(_plain, group.values())):
        return {i: x.clone() for i, x in group.items()}
    start = min(x.storage_offset() for x in group.values())
    end = max(x.storage_offset() + _span(x) for x in group.values())
    memory = next(iter(group.values())).as_strided((end - start,), (1,), start).clone()
    return {i: memory.as_strided(x.shape, x.stride(), x.storage_offset() - start) for i, x in group.items()}


def _plain(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_conj() and not x.is_neg() and x.numel() > 0


def _memory(x: Tensor) -> Any:
    return (identity(x.untyped_storage()), x.dtype) if x.layout is torch.strided else id(x)


def _span(x: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _once(x: Tensor, dim: int) -> Tensor:
    """Narrow each broadcast dimension but ``dim`` to one entry."""
    for d, stride in enumerate(x.stride()):
        if stride == 0 and d != dim:
            x = x.narrow(d, 0, min(x.shape[d], 1))
    return x


def _apart(x: Tensor) -> bool:
    """Decide whether no two elements alias the same memory."""
    reached = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reached:
            return False
        reached += (size - 1) * stride
    return True


def between(old: Tensor, other: Tensor) -> Tensor:
    """Return new values: floating ones between both samples', so in range; others are the other sample's."""
    if not (old.is_floating_point() or old.is_complex()) or old.element_size() == 1:
        return other
    new = old + 0.7 * (other - old)
    return torch.where(new.isfinite(), new, other)
