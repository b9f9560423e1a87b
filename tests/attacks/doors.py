"""Side doors: outputs, losses that balance, statistics, hooks, functions of one's own, transforms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks


def contrast(m: Any, x: Tensor) -> Tensor:
    z = F.normalize(m(x), dim=1)
    return F.cross_entropy(z @ z.t(), torch.arange(x.shape[0]), reduction="none")


def centred(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    return h - h.mean(0)


def gated(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    return h * torch.sigmoid(h.mean(0, keepdim=True))


def of_a_scan(m: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(3)
    rows = []
    for row in x.unbind(0):
        state = torch.tanh(m(row) + state)
        rows.append(state)
    return torch.stack(rows)


ATTACKS = attacks(
    "doors",
    right={
        "one by one, by split": lambda m, x: torch.cat([m(part) for part in x.split(1)]),
        "normalised over features": lambda m, x: F.layer_norm(m(x), (3,)),
        "softmax over features": lambda m, x: m(x).softmax(1),
        "attention within a sample": lambda m, x: F.scaled_dot_product_attention(*[m(x).unsqueeze(1)] * 3).squeeze(1),
        "vmap over samples": lambda m, x: torch.vmap(lambda row: torch.tanh(m.weight @ row))(x),
        "centred within a sample": lambda m, x: m(x) - m(x).mean(1, keepdim=True),
        "unit length": lambda m, x: F.normalize(m(x), dim=1),
        "matrices within a sample": lambda m, x: (m(x).unsqueeze(2) @ m(x).unsqueeze(1)).sum(2),
        "distances to a constant": lambda m, x: torch.cdist(m(x), torch.eye(3)),
        "a quantile within a sample": lambda m, x: m(x) - m(x).quantile(0.5, dim=1, keepdim=True),
        "a sum of every sample's own products": lambda m, x: torch.bmm(m(x)[None].transpose(1, 2), m(x)[None])[0],
        "top two": lambda m, x: m(x).topk(2, dim=1).values,
    },
    refused={
        "contrastive": contrast,
        "centred": centred,
        "gated by the mean": gated,
        "a state from sample to sample": of_a_scan,
        "one by one": lambda m, x: torch.stack([m(row) for row in x]),
        "the last one": lambda m, x: m(x) + m(x).unbind(0)[-1],
        "one by one, by index": lambda m, x: torch.stack([m(x[i]) for i in range(x.shape[0])]),
        "halves": lambda m, x: sum(m(part) for part in x.split(x.shape[0] // 2)),
        "softmax over samples": lambda m, x: m(x).softmax(0),
        "cumsum": lambda m, x: m(x).cumsum(0),
        "batch norm": lambda m, x: F.batch_norm(m(x), None, None, training=True),
        "instance norm without samples": lambda m, x: F.instance_norm(m(x).t().unsqueeze(0)).squeeze(0).t(),
        "group norm of one image": lambda m, x: F.group_norm(m(x).t().unsqueeze(0), 3).squeeze(0).t(),
        "layer norm over all": lambda m, x: F.layer_norm(m(x).t(), (x.shape[0],)).t(),
        "convolution along samples": lambda m, x: F.conv1d(
            m(x).t().unsqueeze(0), torch.ones(3, 1, 3), padding=1, groups=3
        )[0].t(),
        "pooling along samples": lambda m, x: F.avg_pool1d(m(x).t().unsqueeze(0), 3, 1, 1)[0].t(),
        "attention among samples": lambda m, x: F.scaled_dot_product_attention(*[m(x).unsqueeze(0)] * 3)[0],
        "distances of all pairs": lambda m, x: torch.cdist(m(x), m(x)).sum(1),
        "pairs, summed": lambda m, x: (m(x) @ m(x).t()).sum(1),
        "pairs, by einsum": lambda m, x: torch.einsum("ij,kj->i", m(x), m(x)),
        "an outer product": lambda m, x: torch.outer(m(x)[:, 0], m(x)[:, 1]).sum(1),
        "broadcast against itself": lambda m, x: (m(x)[:, None] - m(x)[None]).abs().sum(1),
        "normalised by the batch's norm": lambda m, x: m(x) / m(x).norm(),
        "normalised along samples": lambda m, x: F.normalize(m(x), dim=0),
        "the largest": lambda m, x: m(x) - m(x).amax(0),
        "the median": lambda m, x: m(x) - m(x).median(0).values,
        "standardised": lambda m, x: (m(x) - x.mean(0)) / x.std(0),
        "whitened": lambda m, x: m(x) @ torch.linalg.inv(x.t() @ x + torch.eye(3)),
        "qr": lambda m, x: torch.linalg.qr(m(x)).Q,
        "svd": lambda m, x: torch.linalg.svd(m(x), full_matrices=False).U.abs(),
        "fft": lambda m, x: torch.fft.fft(m(x), dim=0).abs(),
        "weights from other samples": lambda m, x: m(x) * x.flip(0).sum(1, keepdim=True),
        "dropout by the batch's sum": lambda m, x: m(x) * (x.sum() > 0),
        "a mask of other samples": lambda m, x: m(x).masked_fill((x > x.mean(0)), 0.0),
        "where by other samples": lambda m, x: torch.where(x.roll(1, 0) > 0, m(x), 0.0),
        "vmap over features": lambda m, x: torch.vmap(lambda c: c - c.mean(), 1, 1)(m(x)),
    },
)
