"""Outputs without a sample layout, such as a mean loss: each sample's part of their gradient, from plain autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxgrad.kernels.precision import wide
from fxgrad.samples.layouts import Layout
from fxgrad.verification.oracle import Grads, dense, distance, gradients

ByOutput = list[Tensor | None]  # the loss's gradient by each output

# Note [Undivided outputs]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# A mean loss s has no rows, so dL/ds says nothing about a single sample. Two ways give each sample's part of dL/dW, and
# neither looks at the gradients under test.
# 1. A model often returns what its loss is a function of, such as the logits. Then s reaches the parameters only
#    through outputs with samples, and ds/dy has rows. We accept that if the pull-back of ds/dy equals ds/dW.
# 2. Otherwise s = Σ_i w_i s_i is assumed, with s_i the output of sample i alone. The plain model's own gradients,
#    ds/dW = Σ_i w_i ds_i/dW, determine the weights w_i: one equation per element of W, one unknown per sample.
# If both fail, the output has no reference.


@dataclass(frozen=True)
class Undivided:
    """An output without a sample layout that the loss depends on. See Note [Undivided outputs]."""

    index: int  # among the outputs
    grads: Grads  # the parameters' gradients through this output, for the whole batch
    through: ByOutput | None  # the gradient by outputs with samples, if all gradient flows through them


def undivided_outputs(
    leaves: Sequence[Tensor],
    by_output: Sequence[Tensor | None],
    places: Sequence[Layout | None],
    parameters: Mapping[str, Tensor],
    tolerance: float,
) -> list[Undivided]:
    """Return the undivided ones of a forward's outputs ``leaves``; ``by_output`` is the loss's gradient by each."""
    divided = [k for k, place in enumerate(places) if place is not None and leaves[k].requires_grad]
    undivided = []
    for k, (g, place) in enumerate(zip(by_output, places, strict=True)):
        if g is None or place is not None:
            continue
        alone: ByOutput = [g if j == k else None for j in range(len(leaves))]
        grads = dense(gradients(leaves, parameters, alone), parameters)
        through = None
        for cut in [*([j] for j in reversed(divided)), divided]:
            rows = gradients(leaves, {j: leaves[j] for j in cut}, alone)
            candidate = [rows.get(j) for j in range(len(leaves))]
            if distance(dense(gradients(leaves, parameters, candidate), parameters), grads) <= tolerance:
                through = candidate
                break
        undivided.append(Undivided(k, grads, through))
    return undivided


def added(by_output: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> ByOutput:
    """Add two gradients by each output."""
    pairs = zip(by_output, others, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def shares(rows: Grads, total: Grads, tolerance: float, rounding: float = 2.0**-52) -> Tensor | None:
    """Return the w of ``total = Σ_i w_i rows_i``, of shape [n]; None if there is none, or more than one.

    A sum (w_i = 1) or a mean (w_i = 1/n) is taken if it fits. Otherwise the rows must be linearly independent, and have
    more elements than samples. Equal rows get equal shares. Rows of zeros, or not finite, get the share 0.

    >>> rows = {"w": torch.eye(4, dtype=torch.float64)[:3]}
    >>> shares(rows, {"w": torch.tensor([0.5, 0.0, 0.5, 0.0], dtype=torch.float64)}, 1e-10).tolist()
    [0.5, 0.0, 0.5]
    """
    a = torch.cat([wide(g).reshape(len(g), -1) for g in rows.values()], 1)
    b = torch.cat([wide(g).reshape(-1) for g in total.values()])

    def fits(w: Tensor | None) -> bool:
        if w is None:
            return False
        return distance({name: g.sum(0) for name, g in weighted(rows, w).items()}, total) <= tolerance

    for share in (1.0, 1 / len(a)):
        if fits(w := b.new_full([len(a)], share)):
            return w
    solved = _solved(a, b, min(10 * rounding / tolerance, 1.0))
    return solved if fits(solved) else None


def weighted(rows: Grads, weights: Tensor) -> Grads:
    """Multiply each sample's gradients with its weight; where that is 0, also those that are not finite."""
    by_name: Grads = {}
    for name, g in rows.items():
        w = weights.to(g).view(-1, *[1] * (g.dim() - 1))
        by_name[name] = torch.where(w == 0, torch.zeros_like(g), g * w)
    return by_name


def _solved(a: Tensor, b: Tensor, precision: float) -> Tensor | None:
    """Return the w of ``b = Σ_i w_i a_i``; None if its equations leave w open, up to equal rows."""
    norms = a.norm(dim=1)
    used = norms.isfinite() & (norms > 0)
    if not used.any() or not b.isfinite().all():
        return None
    used &= norms > precision * norms[used].max()
    norms, units = norms[used], a[used] / norms[used].unsqueeze(1)
    q, r = torch.linalg.qr(units.T)  # the columns of r: the rows in few coordinates
    equal = torch.cdist(r.T, r.T, compute_mode="donot_use_mm_for_euclid_dist") <= precision
    equal &= (norms - norms.unsqueeze(1)).abs() <= precision * norms
    distinct = int((~equal.tril(-1).any(1)).sum())
    rank = int((torch.linalg.svdvals(r) > precision).sum())
    if rank < distinct or distinct >= a.shape[1]:
        return None
    w = torch.zeros_like(a[:, 0])
    w[used] = torch.linalg.pinv(r, rtol=precision) @ (q.T @ b) / norms
    return w
