"""The order in which a graph's kernels run: what frees memory runs as early as it can.

Inductor tries several orders and takes the one whose peak it estimates lowest. It does not know there what will be
written in another value's place, so the highest point may be one that is none, and orders differ by nothing. Then the
sum of a bias's gradients may stand at the end of a backward, where it is used, and with it the gradient of the layer's
output, which nothing else needs that long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxgrad.host.inductor import Kernel

LITTLE = 16  # what is made is little beside what is freed, if it is so many times less


def earlier(kernels: Sequence[Kernel]) -> list[int]:
    """Return another order of kernels, by their places in the given one, in which the peak is not higher.

    A kernel goes to where it frees as much as it allocates, if it may run there. One that allocates little goes to the
    first place where it may run. None passes a kernel that does something else, such as an assert.
    """
    order = list(range(len(kernels)))
    place, most = _places(order), _peak(kernels, order)
    for one in range(len(kernels)):
        to, here = _place_for(one, kernels, place), place[one]
        if to == here:
            continue
        moved = [*order[:to], one, *order[to:here], *order[here + 1 :]]
        if (peak := _peak(kernels, moved)) <= most:
            order, place, most = moved, _places(moved), peak
    return order


def lowest(orders: Sequence[Sequence[Kernel]]) -> tuple[int, list[int]]:
    """Return which of several orders of a graph's kernels has the lowest peak when it is made `earlier`, and that."""
    found = [earlier(kernels) for kernels in orders]
    peaks = [_peak(kernels, order) for kernels, order in zip(orders, found, strict=True)]
    best = peaks.index(min(peaks))
    return best, found[best]


def _places(order: Sequence[int]) -> dict[int, int]:
    return {one: i for i, one in enumerate(order)}


def _place_for(one: int, kernels: Sequence[Kernel], place: Mapping[int, int]) -> int:
    kernel, here = kernels[one], place[one]
    acting = (other for other in place if kernels[other].acts and place[other] < here)
    first = max((place[other] for other in (*kernel.behind, *acting)), default=-1) + 1
    if first >= here or kernel.acts:
        return here
    others = ((size, readers - {one}) for size, readers in kernel.reads)
    ends = sorted((max((place[reader] for reader in readers), default=-1), size) for size, readers in others)
    freed = 0
    for end, size in ends:
        freed += size
        if end < here and freed >= max(kernel.made, 1):
            return first if LITTLE * kernel.made <= freed else min(here, max(first, end + 1))
    return here


def _peak(kernels: Sequence[Kernel], order: Sequence[int]) -> int:
    """Return the most bytes that are held while a kernel runs, where nothing is written in another value's place."""
    held = most = 0
    place = _places(order)
    for i, one in enumerate(order):
        held += kernels[one].made
        most = max(most, held)
        held -= sum(size for size, readers in kernels[one].reads if max(map(place.__getitem__, readers)) == i)
    return most
