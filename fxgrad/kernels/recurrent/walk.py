"""The walk through time: which states a step reads and writes, and the blocks of steps a backward takes at once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

BLOCK = 1 << 18  # bytes of one value in a block of steps: what is computed for all of them stays in the cache
Step = tuple[int, int, int]  # time, and the rows of the states before and after it


def steps(length: int, reverse: bool) -> Iterator[Step]:
    """Yield the walk through time; states have ``length + 1`` rows, the first one given."""
    for t in reversed(range(length)) if reverse else range(length):
        yield (t, t + 1, t) if reverse else (t, t, t + 1)


def states_before(states: Tensor, reverse: bool) -> Tensor:
    """Of states ``[T + 1, ..]``, the ones each step started from: ``[T, ..]``."""
    return states[1:] if reverse else states[:-1]


def states_after(states: Tensor, reverse: bool) -> Tensor:
    """Of states ``[T + 1, ..]``, the ones each step left: ``[T, ..]``."""
    return states[:-1] if reverse else states[1:]


def last(dhs: Tensor, reverse: bool) -> Tensor:
    """Return the row of what arrives at every step that belongs to the walk's last one."""
    return dhs[0 if reverse else -1]


def blocks(like: Tensor, length: int, reverse: bool) -> Iterator[tuple[slice, list[tuple[int, int, int]]]]:
    """Blocks of steps, the last step of the walk first: their times, and for each (row in the block, time, before)."""
    size = max(1, BLOCK // max(1, like[0].numel() * like.element_size()))
    walk = list(steps(length, reverse))[::-1]
    for i in range(0, length, size):
        block = walk[i : i + size]
        low = min(t for t, _, _ in block)
        yield slice(low, low + len(block)), [(t - low, t, before) for t, before, _ in block]
