"""The collectives of tensor parallelism as operators, each with its transpose as its backward.

A value is either replicated, equal on every process of the group with an equal gradient, or it varies:

| operator | forward | backward | value |
|---|---|---|---|
| copy_to_region | identity | all-reduce | replicated -> varying |
| reduce_from_region | all-reduce | identity | varying -> replicated |
| gather_from_region | all-gather | own part | varying -> replicated |
| scatter_to_region | own part | all-gather | replicated -> varying |
| gather_from_sequence | all-gather | reduce-scatter | varying -> varying |
| reduce_scatter_to_sequence | reduce-scatter | all-gather | varying -> varying |
| rows_of_region | indices among the own rows | none | replicated -> varying |

The names are Megatron-LM's. `fxgrad.passes.prove_replicas` checks every operand. A group goes by the ranks of its
processes, "0,1": two groups of the same processes compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxgrad.host.tensors import assert_on_device
from fxgrad.kernels.operators import operator

_GROUPS: dict[str, Any] = {}


def name_group(group: Any) -> str:
    """Return the name by which operators find a group of processes."""
    name = ",".join(map(str, dist.get_process_group_ranks(group)))
    _GROUPS[name] = group
    return name


def size_of(group: str) -> int:
    return group.count(",") + 1


def _sizes(x: Tensor, dim: int, sizes: int) -> list[Any]:
    return [size * sizes if d == dim % x.dim() else size for d, size in enumerate(x.shape)]


def _summed(x: Tensor, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_GROUPS[group])
    return total


def _gathered(x: Tensor, dim: int, group: str) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size_of(group))]
    dist.all_gather(parts, x.contiguous(), group=_GROUPS[group])
    return torch.cat(parts, dim)


def _part(x: Tensor, dim: int, group: str) -> Tensor:
    """Return this process's part of a whole."""
    size = x.shape[dim] // size_of(group)
    place = dist.get_rank(_GROUPS[group])
    return x.narrow(dim, place * size, size).clone(memory_format=torch.contiguous_format)


def _check_even(x: Tensor, dim: int, group: str) -> None:
    """A shard of another size than the others would be cut short in silence."""
    torch._check(
        x.shape[dim] % size_of(group) == 0,
        lambda: f"dimension {dim} of a value of shape {list(x.shape)} is not a multiple of {size_of(group)} processes",
    )


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_whole(x: Tensor, dim: int, group: str) -> Tensor:
    return x.new_empty(_sizes(x, dim, size_of(group)))


def _like_part(x: Tensor, dim: int, group: str) -> Tensor:
    count = size_of(group)
    return x.new_empty([size // count if d == dim % x.dim() else size for d, size in enumerate(x.shape)])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.place = inputs[1:]


def _backward(transpose: str) -> Callable[..., Any]:
    """Return the backward that is another of these operators, by its name: it may be defined later."""

    def backward(ctx: Any, g: Tensor) -> Any:
        return (globals()[transpose](g, *ctx.place), *[None] * len(ctx.place))

    return backward


@operator(_like, keep=_keep, backward=_backward("reduce_from_region"))
def copy_to_region(x: Tensor, group: str) -> Tensor:
    """x; its gradient is the sum of the processes' gradients."""
    return x.clone(memory_format=torch.contiguous_format)


@operator(_like, keep=_keep, backward=_backward("copy_to_region"))
def reduce_from_region(x: Tensor, group: str) -> Tensor:
    """Σ_r x_r"""
    return _summed(x, group)


@operator(_like_whole, keep=_keep, backward=_backward("scatter_to_region"))
def gather_from_region(x: Tensor, dim: int, group: str) -> Tensor:
    """The parts of all processes, one behind the other along a dimension."""
    return _gathered(x, dim, group)


@operator(_like_part, keep=_keep, backward=_backward("gather_from_region"))
def scatter_to_region(x: Tensor, dim: int, group: str) -> Tensor:
    """The process's own part along a dimension."""
    _check_even(x, dim, group)
    return _part(x, dim, group)


@operator(_like_whole, keep=_keep, backward=_backward("reduce_scatter_to_sequence"))
def gather_from_sequence(x: Tensor, dim: int, group: str) -> Tensor:
    """As `gather_from_region`, where every process uses the whole in another way."""
    return _gathered(x, dim, group)


@operator(_like_part, keep=_keep, backward=_backward("gather_from_sequence"))
def reduce_scatter_to_sequence(x: Tensor, dim: int, group: str) -> Tensor:
    """The process's own part of Σ_r x_r; by an all-reduce, which every backend has."""
    _check_even(x, dim, group)
    return _part(_summed(x, group), dim, group)


@operator(lambda x, rows, group: torch.empty_like(x))
def rows_of_region(x: Tensor, rows: int, group: str) -> Tensor:
    """Return indices of a table of which each process has ``rows``, as indices of its own; -1 for others' rows.

    An operator, as the rank must not be a number in a graph.
    """
    assert_on_device(((x >= 0) & (x < rows * size_of(group))).all(), "an index is outside of an embedding's table")
    own = x - dist.get_rank(_GROUPS[group]) * rows
    return torch.where((own >= 0) & (own < rows), own, -1)


@operator(lambda x, group: x.new_empty([size_of(group), *x.shape]))
def every_process(x: Tensor, group: str) -> Tensor:
    """``[*shape] -> [processes, *shape]``, the same on every process."""
    return _gathered(x.unsqueeze(0), 0, group)
