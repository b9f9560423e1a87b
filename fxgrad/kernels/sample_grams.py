"""Products ``<D_n, E_m>`` of samples' gradients, from the products of their positions.

Of a Gram matrix, which is an operator, D and E are one. Elsewhere E is of other samples (gradients/others.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxgrad.kernels.operators import operator
from fxgrad.kernels.tables import without

ELEMENTS = 1 << 20  # products of positions that are there together


def _by_samples(shape: tuple[int, int, int, int], of: Callable[[slice], Tensor], like: Tensor) -> Tensor:
    """Some samples with all others at a time: ``of`` gives the products of all their positions, ``[b k, m l]``."""
    n, k, m, k_of_others = shape
    step = max(1, ELEMENTS // max(k * m * k_of_others, 1))
    out = like.new_empty(n, m)
    for start in range(0, n, step):
        block = slice(start, min(start + step, n))
        out[block] = of(block).view(block.stop - start, k, m, k_of_others).sum((1, 3))
    return out


def of_products(g: Tensor, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """``[n, m]``, of ``Σ_k g[n, k, o] x[n, k, i]`` and ``Σ_l h[m, l, o] y[m, l, i]``."""
    by_h, by_y = h.flatten(0, 1).t(), y.flatten(0, 1).t()

    def of(block: slice) -> Tensor:
        return (g[block].flatten(0, 1) @ by_h).mul_(x[block].flatten(0, 1) @ by_y)

    return _by_samples((*g.shape[:2], *h.shape[:2]), of, g)


def of_tables(ids: Tensor, g: Tensor, others: Tensor, h: Tensor, padding_idx: int) -> Tensor:
    """``[n, m]``, of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``, and from others ``[m, l]`` and h."""
    g, flat, every = without(padding_idx, ids, g), h.flatten(0, 1).t(), others.flatten()

    def of(block: slice) -> Tensor:
        return (g[block].flatten(0, 1) @ flat).mul_(ids[block].reshape(-1, 1) == every)

    return _by_samples((*ids.shape, *others.shape), of, g)


@operator(lambda g, x: g.new_empty(g.shape[0], g.shape[0]))
def product_gram(g: Tensor, x: Tensor) -> Tensor:
    """Of ``Σ_k g[n, k, o] x[n, k, i]``."""
    return of_products(g, x, g, x)


@operator(lambda ids, g, padding_idx: g.new_empty(g.shape[0], g.shape[0]))
def table_gram(ids: Tensor, g: Tensor, padding_idx: int) -> Tensor:
    """Of a table's gradients from ids ``[n, k]`` and g ``[n, k, d]``."""
    return of_tables(ids, g, ids, g, padding_idx)
