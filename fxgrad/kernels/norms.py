"""Norms of per-sample gradients, and a bound on what rounding may have hidden.

What measures gradients returns norms in float64, and upper bounds that hold for the gradients in exact arithmetic, as
one tensor ``[2, n]``: one node of a traced graph, which a compiler does not have to write to memory. A sum of
m products in a dtype of unit roundoff u errs by at most γ(m) Σ|products|, whatever its order (Higham, Accuracy and
Stability of Numerical Algorithms, section 3.1); kernels add blocks of at most `CHAIN` products, and then the blocks.
Where float32 overflows or loses a sample to underflow, that sample is computed again in float64, scaled. On a GPU the
host would have to wait to see which samples these are: there every sample is scaled before (`by_scaling`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from fxgrad.host.dispatch import tracer
from fxgrad.kernels.fusible import fusible
from fxgrad.kernels.operators import operator
from fxgrad.kernels.precision import unit

CHAIN = 512  # products that a kernel adds one after another, at most
BLOCK = 1 << 20  # bytes of gradients that are looked at together: they stay in the cache
BLOCK_ON_GPU = 1 << 28  # likewise, where a launch costs more than memory
TINY = 1e-30  # norms below this may have lost digits to underflow on the way
FEW = 16  # parameters whose norms a compiler gets as one expression, at most
SMALL = 1e-12  # likewise, where squares are summed in float32


def gamma(m: int, dtype: torch.dtype, blocks: int = 0) -> float:
    """The relative error of a sum of m products, at most; ``blocks``: how many there are, if more than m / CHAIN."""
    chain = m if m <= CHAIN and blocks <= 1 else min(m, CHAIN) + max(m / CHAIN, blocks)
    return (chain + 2) * unit(dtype)


def in_a_row(m: int, dtype: torch.dtype) -> float:
    """The same for products that are added up one after another, as compilers do; m is below 100,000 in float32."""
    return 1.01 * (m + 2) * unit(dtype)


def norms_like(rows: Tensor, *others: object) -> Tensor:
    """Memory for the norms of ``rows`` and their bounds, ``[2, n]``."""
    return rows.new_empty((2, rows.shape[0]), dtype=torch.float64)


@fusible(lambda rows: rows.new_empty(rows.shape[0], dtype=torch.float64))
def frobenius(rows: Tensor) -> Tensor:
    """‖rows_n‖ in float64, ``[n]``: no finite value over- or underflows on the way."""
    rows = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
    flat = as_vectors(rows)
    if not is_wide(rows) or flat.shape[1] == 0:
        return sum_squares(rows).sqrt()
    scale = flat.abs().amax(1, keepdim=True)
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    return (flat / safe).square().sum(1).sqrt() * safe.squeeze(1)


@fusible(lambda rows: rows.new_empty(rows.shape[0], dtype=torch.float64))
def sum_squares(rows: Tensor) -> Tensor:
    """‖rows_n‖² in float64, ``[n]``, of real values; in narrower types it cannot over- or underflow."""
    return as_vectors(rows).double().square().sum(1)


def is_wide(value: Tensor | torch.dtype) -> bool:
    """Return whether squares of such numbers may be too large, or too small, for float64."""
    return (value.dtype if isinstance(value, Tensor) else value) in (torch.float64, torch.complex128)


def quick_frobenius(rows: Tensor) -> Tensor:
    """The same outside of a traced graph, off by γ(CHAIN) at most: squares are summed in float32, `CHAIN` at a time."""
    if rows.dtype is not torch.float32:
        return frobenius(rows)
    if not is_readable(rows):
        norms: Tensor = torch.linalg.vector_norm(as_vectors(rows), dim=1, dtype=torch.float64)
        return norms
    dims = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)  # as they lie in memory: nothing is copied
    flat = as_vectors(rows.permute(0, *dims))
    whole = flat.shape[1] // CHAIN * CHAIN
    parts = [torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, CHAIN)), dim=2)] if whole else []
    if whole < flat.shape[1] or not whole:
        parts.append(torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True))
    norms = torch.cat(parts, 1).double().square().sum(1).sqrt()
    doubtful = ~norms.isfinite() | (norms < SMALL)
    if bool(doubtful.any()):
        norms[doubtful] = frobenius(rows[doubtful])
    return norms


def is_readable(value: Tensor) -> bool:
    """Return whether the host may read a number without waiting for a device."""
    return value.device.type == "cpu"


def as_vectors(rows: Tensor) -> Tensor:
    """``[n, *shape]`` as ``[n, elements]``, also of a 0-dim parameter's gradients ``[n]``."""
    return rows.unsqueeze(-1).flatten(1)


def joined(norms: Tensor, bounds: Tensor) -> Tensor:
    """Return both as one tensor, ``[2, n]``, in the form that `fusible.opened` takes apart again."""
    return torch.cat([norms.unsqueeze(0), bounds.unsqueeze(0)])


Doubtful = Tensor | None  # which samples' norms float32's range may have spoilt, ``[n]``; None where none is


def norms_of_kernel(g: Tensor, write: Callable[[Tensor], int]) -> tuple[Tensor, Doubtful]:
    """Norms and bounds ``[2, n]`` that a kernel writes, as `struct Norms` of common.cpp: NaN where they are doubtful.

    It returns how many samples these are: to ask PyTorch takes longer than some of the kernels do.
    """
    found = norms_like(g)
    return found, found[0].isnan() if write(found) else None


def root_sum_squares(norms: Sequence[Tensor], wide: bool) -> Tensor:
    """m tensors of norms and bounds ``[2, n] -> [2, n]``: √Σ_m norms².

    ``wide``: of gradients in float64, scaled so that no finite result overflows. Of narrower types the squares fit into
    float64.
    """
    return (root_of_few if len(norms) <= FEW else root_of_many)(norms, wide)


@fusible(lambda norms, wide: norms[0].new_empty(norms[0].shape))
def root_of_few(norms: Sequence[Tensor], wide: bool) -> Tensor:
    """The same, added one by one: joined first, each would be written to memory in a loop of its own."""
    return joined(*(_root_of_few([both[i] for both in norms], wide) for i in (0, 1)))


@operator(lambda norms, wide: norms[0].new_empty(norms[0].shape))
def root_of_many(norms: Sequence[Tensor], wide: bool) -> Tensor:
    """The same, joined first: as one expression a compiler would get thousands of lines, which no other model shares.

    Without it what measures a layer is code of its own, alike for all layers of one kind.
    """
    joint = torch.stack(list(norms))
    if not wide:
        return joint.square_().sum(0).sqrt_()
    scale = joint.amax(0)
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    return joint.div_(safe).square_().sum(0).sqrt_().mul_(safe)


def _root_of_few(norms: Sequence[Tensor], wide: bool) -> Tensor:
    if not wide:
        return reduce(torch.add, [norm.square() for norm in norms]).sqrt()
    scale = reduce(torch.maximum, norms)
    safe = torch.where((scale > 0) & scale.isfinite(), scale, 1)
    return reduce(torch.add, [(norm / safe).square() for norm in norms]).sqrt() * safe


def measured(rows: Tensor, rounding: Tensor) -> Tensor:
    """`bounded`, outside of a traced graph: ``[2, n]``."""
    norms = quick_frobenius(rows)
    return torch.stack([norms, norms * (1 + gamma(CHAIN, rows.dtype)) + rounding])


@fusible(norms_like)
def bounded(rows: Tensor, rounding: Tensor) -> Tensor:
    """Norms of gradients as they were computed, and bounds of what they were before rounding."""
    norms = frobenius(rows)
    return joined(norms, norms * (1 + 1e-12) + rounding)


def slices(g: Tensor, size: int) -> list[slice]:
    """Return g's samples, a few at a time, each of which needs ``size`` bytes."""
    block = max(2, (BLOCK if is_readable(g) else BLOCK_ON_GPU) // max(size, 1))
    return [slice(start, start + block) for start in range(0, len(g), block)]


Measure = Callable[[Tensor, Tensor], Tensor]  # of g's and x's samples ``[n, ..]`` the norms and bounds ``[2, n]``


def by_blocks(g: Tensor, x: Tensor, slices: Sequence[slice], measure: Measure, carefully: Measure) -> Tensor:
    """Of g's and x's samples a few at a time; those whose norm float32 could not hold, once more by themselves."""
    parts = [(measure if is_readable(g) else by_scaling(measure))(g[rows], x[rows]) for rows in slices]
    norms = torch.cat(parts, 1) if parts else norms_like(g)
    return again(g, x, norms, ~norms[1].isfinite() | (norms[1] < TINY), carefully) if is_readable(g) else norms


def by_scaling(measure: Measure) -> Measure:
    """Measure samples whose largest entries are near 1, so that none overflows, and nobody has to look.

    What underflows then is below ``tiny`` in each product: the bound counts it for every pair of entries.
    """

    def scaled(g: Tensor, x: Tensor) -> Tensor:
        (g, of_g), (x, of_x) = near_one(g), near_one(x)
        lost = 8 * math.sqrt(g[0].numel() * x[0].numel() * torch.finfo(g.dtype).tiny)
        norms = measure(g, x)
        return torch.stack([norms[0], norms[1] + lost]) * of_g * of_x

    return scaled


def near_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples divided by a power of two near the largest entry of each, and these powers in float64, ``[n]``.

    The power is 0 where all entries are: such a sample's bound is 0, too.
    """
    if tracer() is None and not rows.numel():  # a traced graph has samples
        return rows, rows.new_ones(len(rows), dtype=torch.float64)
    largest = as_vectors(rows).abs().amax(1)
    limit = -math.frexp(torch.finfo(rows.dtype).tiny)[1]  # of exponents: larger powers have no reciprocal
    exponents = torch.where(largest.isfinite(), largest.frexp().exponent, 0).clamp(-limit, limit)
    powers = torch.exp2(exponents.double())
    divided = rows / powers.to(largest.dtype).view(-1, *[1] * (rows.dim() - 1))
    return divided, torch.where(largest == 0, 0, powers)


def again(g: Tensor, x: Tensor, norms: Tensor, doubtful: Doubtful, carefully: Measure) -> Tensor:
    """``norms`` with the doubtful samples computed by themselves, but those that have no gradient at all."""
    if doubtful is not None and bool(doubtful.any()):
        zero = (as_vectors(g) == 0).all(1) & as_vectors(x).isfinite().all(1)  # 0 * Inf is NaN
        norms[:, doubtful & zero] = 0
        for row in (doubtful & ~zero).nonzero().flatten().tolist():
            norms[:, row] = carefully(g[row : row + 1], x[row : row + 1]).flatten()
    return norms
