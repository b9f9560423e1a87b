"""Tensors that share memory: the check of a graph's inputs before it writes to them, and copies that share alike."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fxgrad.errors import LostLayout

Key = TypeVar("Key", bound=Hashable)


class Write(NamedTuple):
    """An op that writes to an input, and the user's line."""

    op: str
    where: str


@dataclass(frozen=True)
class Writes:
    """The inputs that a graph writes to, by position, and the names of all inputs."""

    by_input: Mapping[int, Write]
    names: Sequence[str]

    def check(self, values: Sequence[Any]) -> None:
        """Raise if memory that the graph writes to is also another input's, or several elements' of one input.

        The passes follow a write through the views that the graph makes. They see each input as memory of its own.
        """
        regions = _regions(dict(enumerate(values)))
        known = {region.key for region in regions}
        for i in self.by_input:
            if i in known and not apart(values[i]):
                shape, stride = list(values[i].shape), list(values[i].stride())
                self._refuse(i, f"several elements of which share memory: shape {shape}, strides {stride}")
        for one, other in _touching(regions):
            if (one in self.by_input or other in self.by_input) and _overlap(values[one], values[other]):
                i, k = (one, other) if one in self.by_input else (other, one)
                self._refuse(i, f"which shares memory with {self.names[k] if k < len(self.names) else 'sample_weight'}")

    def _refuse(self, i: int, what: str) -> None:
        op, where = self.by_input[i]
        raise LostLayout(
            f"{op} writes to {self.names[i]}, {what}: which samples are read there afterwards cannot be followed",
            where=where,
            advice="Pass a copy, x.clone(), or let the model write to a copy.",
        )


class _Region(NamedTuple):
    start: int  # addresses
    end: int
    key: Any


def _regions(tensors: Mapping[Key, Any]) -> list[_Region]:
    """Return the addresses that tensors lie between, in their order."""
    strided = [(key, x) for key, x in tensors.items() if isinstance(x, Tensor) and x.layout is torch.strided]
    return sorted(
        _Region(x.data_ptr(), x.data_ptr() + _span(x) * x.element_size(), key)
        for key, x in strided
        if x.numel() and x.data_ptr()
    )


def _touching(regions: Sequence[_Region]) -> list[tuple[Any, Any]]:
    """Return the pairs of tensors whose regions have addresses in common."""
    pairs = []
    before: list[_Region] = []
    for region in regions:
        before = [one for one in before if one.end > region.start]
        pairs += [(one.key, region.key) for one in before]
        before.append(region)
    return pairs


def sharing(tensors: Mapping[Key, Tensor]) -> list[list[Key]]:
    """Group tensors so that no two groups have addresses in common; sparse and empty tensors are in none."""
    groups: list[list[Key]] = []
    end = 0
    for region in _regions(tensors):
        if region.start < end:
            groups[-1].append(region.key)
        else:
            groups.append([region.key])
        end = max(end, region.end)
    return groups


def entangled(tensors: Mapping[Key, Tensor]) -> set[Key]:
    """Return the tensors that may share memory with others or among their own elements."""
    return {key for group in sharing(tensors) for key in group if len(group) > 1 or not apart(tensors[key])}


def copies(tensors: Mapping[Key, Tensor], written: Collection[Key], *, double: bool = False) -> dict[Key, Tensor]:
    """Copy each tensor with its strides; those that share memory with one that is written share the copy's.

    With ``double``, floating copies are in float64.
    """
    new = {}
    for group in sharing({key: x for key, x in tensors.items() if not x.is_conj() and not x.is_neg()}):
        together = [group] if not set(group).isdisjoint(written) else [[key] for key in group]
        for keys in together:
            new.update(_copied({key: tensors[key].detach() for key in keys}, double))
    return {key: new[key] if key in new else converted(x.detach(), double).clone() for key, x in tensors.items()}


def _copied(group: Mapping[Key, Tensor], double: bool) -> dict[Key, Tensor]:
    """Copy tensors into one memory, with the offsets and strides of the originals."""
    first = next(iter(group.values()))
    dtype = converted(first.new_empty(0), double).dtype
    if any(x.dtype != first.dtype for x in group.values()):
        if double:
            raise TypeError("tensors of several dtypes share memory")
        dtype = torch.uint8
    size = 1 if dtype == torch.uint8 else first.element_size()
    start = min(x.data_ptr() for x in group.values()) // 16 * 16
    end = max(x.data_ptr() + _span(x) * x.element_size() for x in group.values())
    memory = torch.zeros(-(-(end - start) // 16) * 16 // size, dtype=dtype, device=first.device)
    new = {}
    for key, x in group.items():
        own = memory.view(x.dtype) if dtype == torch.uint8 else memory
        new[key] = own.as_strided(x.shape, x.stride(), (x.data_ptr() - start) // x.element_size())
        once(new[key]).copy_(once(x))
    return new


def converted(x: Tensor, double: bool) -> Tensor:
    """Return a floating tensor in float64, if ``double``; any other tensor as it is."""
    floating = x.is_floating_point() or x.is_complex()
    return x.to(torch.promote_types(x.dtype, torch.float64)) if double and floating else x


def _span(x: Tensor) -> int:
    return 1 + sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])


def once(x: Tensor, dim: int | None = None) -> Tensor:
    """Narrow each broadcast dimension but ``dim`` to one entry."""
    for d, stride in enumerate(x.stride()):
        if stride == 0 and d != dim:
            x = x.narrow(d, 0, min(x.shape[d], 1))
    return x


def apart(x: Tensor) -> bool:
    """Decide whether no two elements share memory."""
    if x.is_contiguous():
        return True
    reached = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride == 0:
            return False
        if stride <= reached:
            return int(_marked(x, x.data_ptr(), _span(x) * x.element_size()).sum()) == x.numel() * x.element_size()
        reached += (size - 1) * stride
    return True


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Decide whether two tensors whose regions touch have memory in common."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    start = min(x.data_ptr(), y.data_ptr())
    size = max(one.data_ptr() + _span(one) * one.element_size() for one in (x, y)) - start
    return bool((_marked(x, start, size) & _marked(y, start, size)).any())


def _marked(x: Tensor, start: int, size: int) -> Tensor:
    """Return a mask of the bytes from an address on, on the CPU, in which a tensor lies."""
    mask, one, item = torch.zeros(size, dtype=torch.bool), once(x), x.element_size()
    strides = [stride * item for stride in one.stride()]
    mask.as_strided((*one.shape, item), (*strides, 1), x.data_ptr() - start).fill_(True)
    return mask
