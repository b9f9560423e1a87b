"""Products ``<D_n, D_m>`` of all samples' gradients with each other, from the products of their positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxgrad.kernels.operators import operator
from fxgrad.kernels.tables import without

ELEMENTS = 1 << 20  # products of positions that are there together


def _by_samples(n: int, k: int, of: Callable[[slice], Tensor], like: Tensor) -> Tensor:
    """Some samples with all others at a time: ``of`` gives the products of all their positions, ``[b k, n k]``."""
    step = max(1, ELEMENTS // max(n * k * k, 1))
    out = like.new_empty(n, n)
    for start in range(0, n, step):
        block = slice(start, min(start + step, n))
        out[block] = of(block).view(-1, k, n, k).sum((1, 3))
    return out


@operator(lambda g, x: g.new_empty(g.shape[0], g.shape[0]))
def product_gram(g: Tensor, x: Tensor) -> Tensor:
    """Of ``Σ_k g[n, k, o] x[n, k, i]``."""
    by_g, by_x = g.flatten(0, 1).t(), x.flatten(0, 1).t()

    def of(block: slice) -> Tensor:
        return (g[block].flatten(0, 1) @ by_g).mul_(x[block].flatten(0, 1) @ by_x)

    return _by_samples(g.shape[0], g.shape[1], of, g)


@operator(lambda ids, g, padding_idx: g.new_empty(g.shape[0], g.shape[0]))
def table_gram(ids: Tensor, g: Tensor, padding_idx: int) -> Tensor:
    """Of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``."""
    g = without(padding_idx, ids, g)
    flat, every = g.flatten(0, 1).t(), ids.flatten()

    def of(block: slice) -> Tensor:
        return (g[block].flatten(0, 1) @ flat).mul_(ids[block].reshape(-1, 1) == every)

    return _by_samples(g.shape[0], g.shape[1], of, g)
