"""Losses in the model that let one sample's data scale another's gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks


def balanced(m: Any, x: Tensor) -> Tensor:
    first, second = m(x).square().sum(), m(x).abs().sum()
    return first + (first.detach() / second.detach()) * second


def balanced_by_item(m: Any, x: Tensor) -> Tensor:
    first, second = m(x).square().sum(), m(x).abs().sum()
    return first + second * (first.item() / second.item())


def balanced_experts(m: Any, x: Tensor) -> Tensor:
    gates = m(x).softmax(1)
    share = F.one_hot(gates.argmax(1), 3).to(gates.dtype).mean(0)
    return (share * gates.mean(0)).sum() * 3


def focal_by_the_batch(m: Any, x: Tensor) -> Tensor:
    loss = m(x).square().sum(1)
    return (loss * loss.detach().mean()).sum()


def by_no_grad(m: Any, x: Tensor) -> Tensor:
    loss = m(x).square().sum()
    with torch.no_grad():
        scale = x.abs().max()
    return loss / scale


def by_a_slot(m: Any, x: Tensor) -> Tensor:
    total = torch.zeros(())
    total.add_(x.abs().sum())
    return m(x).square().sum() / total


def by_out(m: Any, x: Tensor) -> Tensor:
    total = torch.zeros(())
    torch.sum(x.abs(), (0, 1), out=total)
    return m(x).square().sum() / total


def uncertain(m: Any, x: Tensor) -> Tensor:
    loss = m(x).square().mean()
    return torch.exp(-m.bias[0]) * loss + m.bias[0]


ATTACKS = attacks(
    "losses",
    right={
        "a sum": lambda m, x: m(x).square().sum(),
        "two sums": lambda m, x: m(x).square().sum() + 0.1 * m(x).abs().sum(),
        "a sum and a constant": lambda m, x: m(x).square().sum() + 3,
        "a sum, scaled": lambda m, x: m(x).square().sum() * 0.5,
        "a sum by features": lambda m, x: m(x).square().sum() / x.shape[1],
        "a weight of one's own": lambda m, x: (m(x).square().sum(1) * x[:, 0]).sum(),
        "a detached weight of one's own": lambda m, x: (m(x).square() * m(x).detach()).sum(),
        "a sum and a detached maximum": lambda m, x: m(x).sum() + m(x).detach().max(),
        "samples' losses": lambda m, x: F.mse_loss(m(x), x, reduction="none").sum(1),
        "cross entropy": lambda m, x: F.cross_entropy(m(x), x.argmax(1), reduction="sum"),
    },
    refused={
        "a sum and a detached maximum, squared": lambda m, x: (m(x).sum() + m(x).detach().max()).square(),
        "where a sum and a detached maximum say": lambda m, x: m(x) * (m(x).sum() + m(x).detach().max() > 0),
        "times a sum and a detached maximum": lambda m, x: m(x) * (m(x).sum() + m(x).detach().max()).detach(),
        "balanced by detached values": balanced,
        "balanced by numbers": balanced_by_item,
        "balanced experts": balanced_experts,
        "scaled by a detached mean": focal_by_the_batch,
        "scaled under no_grad": by_no_grad,
        "over what a slot took": by_a_slot,
        "over what out= took": by_out,
        "a parameter's factor": uncertain,
        "times the largest": lambda m, x: m(x).square().sum() * x.abs().max(),
        "over the largest": lambda m, x: m(x).square().sum() / x.abs().max(),
        "over the sum of weights": lambda m, x: (m(x).square().sum(1) * x[:, 0]).sum() / x[:, 0].sum(),
        "over the number of positive values": lambda m, x: m(x).square().sum() / (x > 0).sum(),
        "times the number of positive values": lambda m, x: m(x).square().sum() * (x > 0).sum(),
        "alpha of the largest": lambda m, x: torch.add(m(x).sum(), m(x).abs().sum(), alpha=x.max().item()),
        "chosen by the batch": lambda m, x: torch.stack([m(x).sum(), m(x).abs().sum()])[(x.sum() > 0).long()],
        "where by the batch": lambda m, x: torch.where(x.sum() > 0, m(x).sum(), m(x).abs().sum()),
        "the square": lambda m, x: m(x).sum().square(),
        "the logarithm": lambda m, x: m(x).square().sum().log(),
        "the root": lambda m, x: m(x).square().mean().sqrt(),
        "the largest loss": lambda m, x: m(x).square().sum(1).max(),
        "the top losses": lambda m, x: m(x).square().sum(1).topk(2).values.sum(),
        "logsumexp of losses": lambda m, x: m(x).square().sum(1).logsumexp(0),
        "softmax weights": lambda m, x: (m(x).square().sum(1) * x.sum(1).softmax(0)).sum(),
        "variance": lambda m, x: m(x).var(0).sum(),
        "detached mean, subtracted within": lambda m, x: (m(x) - m(x).mean(0).detach()).square().sum(),
        "a clamp": lambda m, x: m(x).sum().clamp(max=1.0),
        "a hinge of the batch": lambda m, x: F.relu(m(x).mean() - 1),
        "huber of the batch": lambda m, x: F.huber_loss(m(x).mean(0), x.mean(0), reduction="sum"),
        "moments": lambda m, x: F.mse_loss(m(x).mean(0), x.mean(0), reduction="sum"),
        "correlation": lambda m, x: (m(x).t() @ m(x)).fill_diagonal_(0).square().sum(),
        "covariance": lambda m, x: torch.cov(m(x).t()).sum(),
        "pairs": lambda m, x: torch.pdist(m(x)).sum(),
        "triplets": lambda m, x: F.triplet_margin_loss(m(x), m(x).roll(1, 0), x, reduction="sum"),
    },
)
