"""Copies of a graph's inputs in which two samples have other values: another sample's, or values between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Change(NamedTuple):
    """The samples to change, and the sample whose values they get."""

    samples: tuple[int, ...]
    source: int


@dataclass(frozen=True)
class Held:
    """An input with samples: position k of dimension ``dim`` belongs to sample ``owners[k]``."""

    value: Tensor
    dim: int
    owners: Tensor

    def sizes(self, samples: int) -> Tensor:
        """The largest magnitude in each sample."""
        rows = self.value.detach().movedim(self.dim, 0).reshape(len(self.owners), -1)
        rows = rows.abs() if rows.is_complex() else rows.double().abs()
        none = torch.zeros(samples, dtype=torch.float64, device=rows.device)
        return none.scatter_reduce(0, self.owners, rows.double().amax(1), "amax")

    def put(self, made: Tensor, change: Change) -> bool:
        """Write the change into a copy of the value; False where no number differs from before.

        A dimension without memory of its own (`expand`) is written once. Where the samples share their memory,
        nothing is written: a change of one sample would be a change of all.
        """
        made, value = _once(made, self.dim), _once(self.value.detach(), self.dim)
        if not _apart(made):
            return False
        source = (self.owners == change.source).nonzero().flatten()
        moved = False
        for sample in change.samples:
            places = (self.owners == sample).nonzero().flatten()
            own = value.index_select(self.dim, places)
            cycled = torch.arange(len(places), device=source.device) % len(source)
            new = _between(own, value.index_select(self.dim, source[cycled]))
            made.index_copy_(self.dim, places, new)
            moved = moved or not torch.equal(own, new)
        return moved


def held_inputs(
    args: Sequence[Any], size: int, dims: Mapping[int, int], packed: Mapping[int, tuple[int, int] | None]
) -> dict[int, Held]:
    """The inputs whose values belong to samples, by position; of a packed sequence, its data."""
    held = {
        i: Held(args[i], dim, torch.arange(size, device=args[i].device)) for i, dim in dims.items() if i not in packed
    }
    for i, places in packed.items():
        if places is not None:
            steps, order = args[places[0]].tolist(), args[places[1]]
            held[i] = Held(args[i], 0, torch.cat([order[:n] for n in steps]).to(args[i].device))
    return held


def chosen(held: Mapping[int, Held], size: int, count: int) -> Change | None:
    """The samples with the largest and the smallest values: a maximum, a minimum or a mean moves with them."""
    known = [one for one in held.values() if one.value.numel()]
    if not known:
        return None
    deciding = next((one for one in known if one.value.is_floating_point()), known[0])
    order = deciding.sizes(size).argsort().tolist()
    return Change((order[-1], order[0])[:count], order[(size - 1) // 2])


def copies(args: Mapping[int, Tensor], written: frozenset[int]) -> dict[int, Tensor]:
    """Copy each tensor with its strides; those that share memory which the graph writes to share the copy's."""
    groups: dict[Any, list[int]] = {}
    shared = {_memory(args[i]) for i in written if i in args}
    for i, x in args.items():
        groups.setdefault(_memory(x) if _memory(x) in shared else i, []).append(i)
    return {i: made for group in groups.values() for i, made in _copied({i: args[i] for i in group}).items()}


def _copied(args: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Copies of tensors, at the distances in memory that the originals have."""
    made = {}
    plain = {}
    for i, x in args.items():
        if x.layout is not torch.strided or x.is_conj() or x.is_neg() or not x.numel():
            made[i] = x.detach().clone()
        else:
            plain[i] = x.detach()
    if plain:
        start = min(x.storage_offset() for x in plain.values())
        end = max(x.storage_offset() + _span(x) for x in plain.values())
        memory = next(iter(plain.values())).as_strided((end - start,), (1,), start).clone()
        for i, x in plain.items():
            made[i] = memory.as_strided(x.shape, x.stride(), x.storage_offset() - start)
    return made


def _memory(x: Tensor) -> Any:
    return (x.untyped_storage()._cdata, x.dtype) if x.layout is torch.strided else id(x)


def _span(x: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _once(x: Tensor, dim: int) -> Tensor:
    """The value with one entry for each dimension that repeats its memory, but for the samples'."""
    for d, stride in enumerate(x.stride()):
        if stride == 0 and d != dim:
            x = x.narrow(d, 0, min(x.shape[d], 1))
    return x


def _apart(x: Tensor) -> bool:
    """Whether no two elements share memory."""
    reached = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reached:
            return False
        reached += (size - 1) * stride
    return True


def _between(own: Tensor, other: Tensor) -> Tensor:
    """Floating values on the way to another sample's, so in the range of both; other values are the other sample's."""
    if not (own.is_floating_point() or own.is_complex()) or own.element_size() == 1:
        return other
    new = own + 0.7 * (other - own)
    new = torch.where(new.isfinite(), new, other)
    return own * 0.9 if torch.equal(new, own) else new
