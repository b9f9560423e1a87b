"""Ops whose second or third operand says which rows are read: bags, sorters, weights of classes, norms of rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks, ids, steps


def every(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def table() -> Tensor:
    return torch.arange(18.0).view(6, 3).sin()


def classes(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def means(x: Tensor) -> Tensor:
    """Average each feature over all samples; none is negative [3]."""
    return x.mean(0).abs()


def two_norms(m: Any, x: Tensor) -> Tensor:
    """The first call shortens the rows that any sample reads, and the second reads them."""
    rows = table() * 9
    first = F.embedding(ids(x)[:, 0], rows, max_norm=1.0)
    return m(x + first * 0 + F.embedding(x.argmin(1), rows, max_norm=5.0))


def a_norm_then_none(m: Any, x: Tensor) -> Tensor:
    rows = table() * 9
    first = F.embedding(ids(x)[:, 0], rows, max_norm=1.0)
    return m(x + first * 0 + F.embedding(x.argmin(1), rows))


def a_norm_then_the_sum(m: Any, x: Tensor) -> Tensor:
    rows = table() * 9
    first = F.embedding(ids(x)[:, 0], rows, max_norm=1.0)
    return m(x + first * 0 + rows.sum(0))


def own_norm(m: Any, x: Tensor) -> Tensor:
    return m(x + F.embedding(ids(x)[:, 0], table() * 9, max_norm=1.0))


def renormalised(m: Any, x: Tensor) -> Tensor:
    rows = table() * 9
    torch.embedding_renorm_(rows, ids(x)[:, 0], 0.5, 2.0)
    return m(x + F.embedding(x.argmin(1), rows))


ATTACKS = attacks(
    "lookups",
    right={
        "bags of one's own ids": lambda m, x: F.embedding_bag(ids(x), m.weight),
        "the largest of a bag": lambda m, x: m(x + F.embedding_bag(ids(x), table(), mode="max")),
        "bags by offsets": lambda m, x: F.embedding_bag(ids(x).flatten(), m.weight, every(x) * 4),
        "bags by offsets, summed": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, torch.arange(0, x.shape[0] * 4, 4), mode="sum", padding_idx=1
        ),
        "bags by offsets, the largest": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, every(x) * 4, mode="max"
        ),
        "bags by offsets and their end": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, torch.arange(x.shape[0] + 1) * 4, include_last_offset=True
        ),
        "bags by offsets, weighed": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, every(x) * 4, mode="sum", per_sample_weights=steps(x)[:, :, 0].flatten()
        ),
        "bags by offsets, of a table": lambda m, x: m(x + F.embedding_bag(ids(x).flatten(), table(), every(x) * 4)),
        "rows of a norm": own_norm,
        "rows of one's own norm": lambda m, x: m(torch.renorm(x, 2, 0, 1.0)),
    },
    refused={
        "bags that the data ends": lambda m, x: m(
            x + F.embedding_bag(torch.arange(6), table(), classes(x).cumsum(0) * (every(x) > 0))
        ),
        "bags of constants, by the data": lambda m, x: m(
            x + F.embedding_bag(torch.arange(6), table(), ids(x)[:, 0] * (every(x) > 0))
        ),
        "a parameter's bags that the data ends": lambda m, x: F.embedding_bag(
            torch.arange(3), m.weight, classes(x).cumsum(0) * (every(x) > 0), mode="sum"
        ),
        "bags that begin one early": lambda m, x: m(
            x + F.embedding_bag(ids(x).flatten(), table(), (every(x) * 4 - 1).clamp(min=0))
        ),
        "bags that bend": lambda m, x: m(
            x + F.embedding_bag(ids(x).flatten(), table(), every(x) * 4 - (every(x) >> 8), mode="max")
        ),
        "bags by offsets, the last of fewer ids": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, every(x) * 4 - (every(x) > x.shape[0] - 2).long()
        ),
        "bags by offsets that leave ids out": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, torch.arange(x.shape[0] + 1) * 3, include_last_offset=True
        ),
        "bags by offsets, of steps": lambda m, x: F.embedding_bag(ids(x).t().flatten(), m.weight, every(x) * 4),
        "bags by offsets, weighed by others": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, every(x) * 4, mode="sum", per_sample_weights=steps(x.flip(0))[:, :, 0].flatten()
        ),
        "bags by offsets, of each other's table": lambda m, x: F.embedding_bag(ids(x)[:, 0], m(x), every(x)),
        "bags by offsets, of a table of all": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m(steps(x)).flatten(0, 1), every(x) * 4
        ),
        "bags by offsets, of half a sample": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, torch.arange(x.shape[0] * 2) * 2
        ).view(-1, 2, 3),
        "bags by offsets, weighed by constants": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, every(x) * 4, mode="sum", per_sample_weights=torch.ones(x.shape[0] * 4)
        ),
        "bags by offsets of the data": lambda m, x: F.embedding_bag(
            ids(x).flatten(), m.weight, every(x) * 4 + (x[:, 0] > 0) * (every(x) > 0)
        ),
        "a sorter of the batch": lambda m, x: m(
            x + torch.searchsorted(torch.arange(3.0), x, sorter=x.mean(0).argsort())
        ),
        "a sorter of the batch for each": lambda m, x: m(
            x
            + torch.searchsorted(
                torch.arange(3.0).expand_as(x).contiguous(), x, sorter=x.mean(0, keepdim=True).expand_as(x).argsort(1)
            )
        ),
        "a margin's weights": lambda m, x: F.multi_margin_loss(m(x), classes(x), weight=means(x), reduction="none"),
        "weights of positives": lambda m, x: F.binary_cross_entropy_with_logits(
            m(x), x.sigmoid(), pos_weight=means(x), reduction="none"
        ),
        "weights of classes": lambda m, x: F.nll_loss(m(x), classes(x), weight=means(x), reduction="none"),
        "the total of weights": lambda m, x: m(
            x * torch.ops.aten.nll_loss_forward(x, classes(x), torch.arange(3.0), 1, -100)[1]
        ),
        "rows of two norms": two_norms,
        "rows of a norm and of none": a_norm_then_none,
        "rows of a norm, summed": a_norm_then_the_sum,
        "rows renormalised": renormalised,
        "features of a norm over samples": lambda m, x: m(torch.renorm(x, 2, 1, 1.0)),
        "two samples' ids": lambda m, x: m(x + torch.isin(ids(x), ids(x)[0]).sum(1, keepdim=True)),
        "ids, numbered": lambda m, x: m(x + torch.unique(classes(x), return_inverse=True)[1][:, None]),
    },
)
