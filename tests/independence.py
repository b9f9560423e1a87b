"""Which dims of a call's inputs hold samples, decided by measurement and not by a list.

A dim of the inputs is a sample dim when the call on every single sample, put side by side, gives the call on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def sample_dims_of_output(
    call: Callable[..., Any], inputs: Sequence[Any], in_dims: Sequence[int | None]
) -> list[int | str] | None:
    """The dim of every output tensor along which the calls on single samples, side by side, give the whole call.

    "sum" or "mean" for a tensor without dims that is this of those of the samples, "same" for integers
    that are equal in all calls. None if there is no such dim: the samples of these inputs are then not independent, or
    the call does not take one sample alone.
    """
    sizes = {x.shape[dim] for x, dim in zip(inputs, in_dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        return None
    whole, parts, size = None, [], sizes.pop()
    with torch.enable_grad():  # some modules take another path without gradients
        try:
            for n in range(size):
                parts.append([y.detach() for y in tensors_of(call(*_single(inputs, in_dims, n)))])
                whole = whole or [y.detach() for y in tensors_of(call(*_copies(inputs)))]
            call(*_first(inputs, in_dims, size - 1))  # a size of a parameter may be that of the batch by chance
        except Exception:  # whatever the op objects to, it is not a legal call
            return None
    if not whole or any(len(part) != len(whole) for part in parts):
        return None
    dims = [_side_by_side(full, [part[k] for part in parts]) for k, full in enumerate(whole)]
    known = [dim for dim in dims if dim is not None]
    return known if len(known) == len(dims) else None


def _side_by_side(full: Tensor, parts: list[Tensor]) -> int | str | None:
    if full.dim() == 0 and full.is_floating_point() and all(part.dim() == 0 for part in parts):
        reductions = {"sum": torch.stack(parts).sum(), "mean": torch.stack(parts).mean()}
        scale = float(torch.stack(parts).abs().sum())  # a tiny loss is no sum for being tiny
        return next((name for name, y in reductions.items() if _near(full, y, 1e-5 * scale)), None)
    if not full.is_floating_point() and not full.is_complex() and all(torch.equal(part, full) for part in parts):
        return "same"  # a status, such as linalg.solve_ex's
    for dim in range(full.dim()):
        if any(part.dim() != full.dim() or part.dtype != full.dtype for part in parts):
            return None
        rest = {tuple(size for k, size in enumerate(t.shape) if k != dim) for t in (full, *parts)}
        if len(rest) > 1 or sum(part.shape[dim] for part in parts) != full.shape[dim] or full.shape[dim] == 0:
            continue
        if torch.allclose(torch.cat(parts, dim), full, rtol=1e-9, atol=1e-9, equal_nan=True):
            return dim
    return None


def _near(a: Tensor, b: Tensor, distance: float) -> bool:
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num()) or (a - b).abs() <= distance)


def choices_of_dims(args: Sequence[Any]) -> Iterator[tuple[int | None, ...]]:
    """Sample dims to try: all tensors along dim 0, then along dim 1, then with some tensors shared by all samples."""

    def options(k: int, x: Any) -> tuple[int | None, ...]:
        dims = tuple(range(min(2, x.dim()))) if isinstance(x, Tensor) else ()
        return dims if k == 0 and dims else (*dims, None)

    def oddity(choice: tuple[int | None, ...]) -> int:
        """Few shared tensors first, then alike dims."""
        return 4 * sum(d is None for d in choice) + 2 * len({*choice} - {None}) + (choice[0] or 0)

    for choice in sorted(product(*(options(k, x) for k, x in enumerate(args))), key=oddity):
        sizes = {x.shape[d] for x, d in zip(args, choice, strict=True) if d is not None}
        if len(sizes) == 1 and sizes != {1}:
            yield choice


def different_copies(x: Tensor, n: int, dim: int) -> Tensor:
    """x with its dim of size 0 or 1 grown to n, no two slices alike, with values an op accepts where it accepts x's."""
    if x.shape[dim] == 0:
        x = x.new_ones([1 if k == dim else size for k, size in enumerate(x.shape)])
    if x.is_floating_point() or x.is_complex():
        return torch.cat([x * (1 - 0.2 * k / n) for k in range(n)], dim)
    return torch.cat([x.flatten().roll(k).reshape(x.shape) for k in range(n)], dim)


def with_one_changed(inputs: Sequence[Tensor], in_dims: Sequence[int | None], n: int) -> list[Tensor]:
    """The inputs with other values for sample n: far off where they are floats, counted from the other end else."""
    changed = []
    for x, dim in zip(inputs, in_dims, strict=True):
        x = x.clone()
        if dim is not None:
            own = x.select(dim, n)
            own.copy_(0.3 - 2 * own if x.is_floating_point() else x.max() + x.min() - own)
        changed.append(x)
    return changed


def tensors_of(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _single(inputs: Sequence[Any], in_dims: Sequence[int | None], n: int) -> list[Any]:
    return _copies([x if dim is None else x.narrow(dim, n, 1) for x, dim in zip(inputs, in_dims, strict=True)])


def _first(inputs: Sequence[Any], in_dims: Sequence[int | None], n: int) -> list[Any]:
    return _copies([x if dim is None else x.narrow(dim, 0, n) for x, dim in zip(inputs, in_dims, strict=True)])


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """What a call that works in place may change."""
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]
