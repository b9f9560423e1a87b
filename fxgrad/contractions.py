"""How a term is contracted where its gradient itself is not asked for.

A linear use with k positions per sample, fan-out o and fan-in i has three ways to its norms:

    rank one       k = 1:  ‖g‖ ‖x‖                        flops  2 (o + i)
    Gram           k × k products of positions            flops  2 k² (o + i)
    materialise    the gradient itself, and reduce it     flops  2 k o i

A convolution's windows have a Gram matrix, too, made of its pixels'. Gram wins while k < T* = o i / (o + i).
Above, what was multiplied out is smaller than the factors, too, so it is kept and the weighted sum reduces it: one
threshold rules time and memory.
"""

from __future__ import annotations

import enum
import math
from typing import Any

from torch import Tensor

from fxgrad.terms import Patches, Term


class Way(enum.Enum):
    """A way to contract a term."""

    RANK_ONE = "rank one"
    GRAM = "Gram"
    MATERIALISE = "materialise"  # multiplied out when its use is differentiated, and kept
    RECOMPUTE = "recompute"  # multiplied out a few samples at a time for the norms, and again for the sum


def hint(size: Any) -> int:
    """A size, or for one that changes from call to call what it was in the first."""
    node = getattr(size, "node", None)
    if node is None:
        return int(size)
    return int(node.hint) if node.hint is not None else 64


def way_of(term: Term) -> Way:
    """The cheapest way to a term's norms and weighted sums."""
    product, table, windows = term.product(), term.rows(), term.windows()
    if product is not None:
        g, x = product
        k, o, i = hint(g.shape[1]), hint(g.shape[2]), hint(x.shape[2])
        if isinstance(g.shape[1], int) and g.shape[1] == 1:
            return Way.RANK_ONE
        return Way.GRAM if k * (o + i) < o * i else Way.MATERIALISE
    if table is not None:
        return Way.RECOMPUTE
    if windows is not None:
        g, patches = windows
        if _gram_of_windows_wins(g, patches):
            return Way.GRAM
        factors = _elements(g) + _elements(patches.input)
        return Way.MATERIALISE if math.prod(patches.kernel) <= 1.25 * factors else Way.RECOMPUTE
    return Way.MATERIALISE


def _gram_of_windows_wins(g: Tensor, patches: Patches) -> bool:
    """Whether the pixels' Gram matrix, added up over shifts, beats the native kernel, which runs at half its speed
    where every sample is a group of its own. Adding a shift up costs some 8 flops for each pair of windows."""
    if patches.transposed or patches.groups != 1 or not isinstance(g.shape[1], int) or g.shape[1] != 1:
        return False
    o, k, channels = hint(g.shape[2]), math.prod(hint(size) for size in g.shape[3:]), hint(patches.input.shape[2])
    shifts = math.prod(patches.kernel[2:])
    space = zip(patches.input.shape[3:], patches.padding, strict=True)
    pixels = math.prod(hint(size) + 2 * padding for size, padding in space)
    gram = 2 * pixels**2 * channels + 2 * k * k * o + 8 * shifts * k * k
    return gram < k * o * channels * shifts


def _elements(factor: Tensor) -> int:
    """Of one sample's part."""
    return math.prod(hint(size) for size in factor.shape[1:])
