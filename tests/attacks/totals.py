"""Sums over all samples, and what becomes of them: a sum may be summed, scaled by constants and returned."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks, ids


def total(m: Any, x: Tensor) -> Tensor:
    """Sum a layer's output over samples [3]."""
    return m(x).sum(0)


def signs(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def sum_and_a_penalty(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    return h.sum() + m.weight.sum() * (h.sum() + x.max()).detach()


def of_its_detached_self(m: Any, x: Tensor) -> Tensor:
    loss = m(x).square().sum()
    return loss * (loss + x.max()).detach()


def detached_beside(m: Any, x: Tensor) -> Tensor:
    """A detached function of the sum is added: no gradient goes there."""
    h = m(x)
    return h.sum() + h.detach().square().sum().sqrt()


ATTACKS = attacks(
    "losses",
    right={
        "a total": total,
        "a detached root beside it": detached_beside,
        "the largest beside it, detached": lambda m, x: m(x).sum() + x.max().detach(),
        "a product with other features": lambda m, x: m(x).t() @ x.sum(1),
        "a product's trace": lambda m, x: (m(x).t() @ x).trace(),
        "a gram matrix": lambda m, x: m(x).t() @ m(x),
        "half precision": lambda m, x: total(m, x).sum().float().double(),
    },
    refused={
        "a penalty scaled by the total": sum_and_a_penalty,
        "scaled by itself, detached": of_its_detached_self,
        "a total, relu": lambda m, x: total(m, x).relu(),
        "a total, normalised": lambda m, x: F.normalize(total(m, x), dim=0),
        "a total, sorted": lambda m, x: total(m, x).sort().values,
        "a total's largest": lambda m, x: total(m, x).max(),
        "a total by the batch's index": lambda m, x: total(m, x)[x.sum(0).argmax()],
        "a total, gathered by the batch": lambda m, x: total(m, x).gather(0, (x.sum(0) > 0).long()),
        "a total times another": lambda m, x: total(m, x) * x.sum(0).detach(),
        "a total and the largest, multiplied": lambda m, x: torch.stack([m(x).sum(), x.max()]).prod(),
        "a total's loss": lambda m, x: F.mse_loss(total(m, x), m.memory),
        "a total's modulus": lambda m, x: m(x).sum().to(torch.complex128).abs(),
        "a total by a mask of the total": lambda m, x: torch.where(total(m, x) > 0, m(x), -m(x)),
        "a sum and its exponential": lambda m, x: m(x).sum() + m(x).sum().exp(),
        "a product with flipped samples": lambda m, x: m(x).t() @ x.flip(0),
        "a sum of products with others": lambda m, x: torch.einsum("bi,bi->", m(x), x.roll(1, 0)),
        "divided by a sum of looked-up weights": lambda m, x: m(x).square().sum() / F.embedding(ids(x), m.weight).sum(),
        "divided by ids and a parameter": lambda m, x: m(x).square().sum() / (ids(x).sum() * m.weight.sum()),
        "a running total over a count": lambda m, x: (m(x).square().sum(1).cumsum(0) / ids(x).sum()).sum(),
        "a total if any id is large": lambda m, x: m(x).sum() * (ids(x) > 1).sum().bool(),
        "added by class": lambda m, x: torch.zeros(3).index_add(0, signs(x), m(x)[:, 0]),
        "averaged by class": lambda m, x: torch.zeros(3).scatter_reduce(0, signs(x), m(x)[:, 0], "mean"),
        "the largest by class": lambda m, x: torch.zeros(3).scatter_reduce(0, signs(x), m(x)[:, 0], "amax"),
        "the last by class": lambda m, x: torch.zeros(3).index_put((signs(x),), m(x)[:, 0]),
    },
)
