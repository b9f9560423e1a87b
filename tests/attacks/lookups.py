"""Tables, masks, positions and losses by ids: whose row is looked up, and by whom."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks, steps


def ids(x: Tensor) -> Tensor:
    return x.argmax(1)


def memory(m: Any, x: Tensor) -> Tensor:
    """A table of the batch's own means by class: prototypes."""
    classes = F.one_hot(ids(x), 3).to(x.dtype)
    means = (classes.t() @ x) / classes.sum(0).clamp(min=1)[:, None]
    return m(x) @ means.t()


def routed(m: Any, x: Tensor) -> Tensor:
    """Capacity: a sample is dropped when others came before it."""
    place = F.one_hot(ids(x), 3).cumsum(0).gather(1, ids(x)[:, None])
    return m(x) * (place <= 2)


def sorted_by_length(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m(x[order])


def sorted_and_back(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m(x[order])[order.argsort()]


def teacher(m: Any, x: Tensor) -> Tensor:
    return F.kl_div(m(x).log_softmax(1), m(x.flip(0)).detach().softmax(1), reduction="none")


def mixup(m: Any, x: Tensor) -> Tensor:
    return m(0.7 * x + 0.3 * x.flip(0))


def cutmix(m: Any, x: Tensor) -> Tensor:
    return m(torch.where(torch.arange(3) > 1, x, x.roll(1, 0)))


def hardest_negative(m: Any, x: Tensor) -> Tensor:
    far = torch.cdist(x, x).argmax(1)
    return m(x[far])


def nearest(m: Any, x: Tensor) -> Tensor:
    near = (torch.cdist(x, x) + 100 * torch.eye(x.shape[0])).argmin(1)
    return m(x) + m(x)[near]


def rows_within(m: Any, x: Tensor, *bounds: float, p: float = 2.0) -> Tensor:
    """Lookups in a table whose rows get shorter when they are read: by the largest features, then by the smallest."""
    table = m.weight.detach().clone()
    F.embedding(ids(x), table, max_norm=bounds[0])
    return m(x) * F.embedding(x.argmin(1), table, max_norm=bounds[1], norm_type=p)


def written_and_within(m: Any, x: Tensor) -> Tensor:
    table = m.weight.detach().clone()
    table[0] = x.sum(0)
    return m(x) * F.embedding(ids(x), table, max_norm=0.1)


def within_and_viewed(m: Any, x: Tensor) -> Tensor:
    table = m.weight.detach().clone()
    rows = ids(x)
    F.embedding(rows, table, max_norm=0.1)
    return m(x) * F.embedding(rows, table.view(9, 1))


def within_and_alike(m: Any, x: Tensor) -> Tensor:
    """Indices of which the proof knows the same, and that are not."""
    table = m.weight.detach().clone()
    largest, smallest = x.argmax(1).clone(), x.argmin(1).clone()
    return m(x) * F.embedding(largest, table, max_norm=0.1) * F.embedding(smallest, table)


def grouped(m: Any, x: Tensor) -> Tensor:
    """A group norm that is called with other sizes than its input has."""
    size = x.shape[0]
    return m(x) * torch.ops.aten.native_group_norm(x[:, :, None], None, None, 1, 3, size, 1, 1e-5)[0][:, :, 0]


def counts(x: Tensor) -> Tensor:
    return x.argmax(1) + 1


def sorted_by_count(m: Any, x: Tensor) -> Tensor:
    _, order = counts(x).sort(descending=True)
    _, back = order.sort()
    return m(x[order])[back]


def sorted_by_argsort(m: Any, x: Tensor) -> Tensor:
    order = counts(x).argsort(descending=True)
    return (m(x[order]) * counts(x)[order][:, None])[order.argsort()]


def sorted_twice(m: Any, x: Tensor) -> Tensor:
    """Put rows back by an order that has the larger numbers first, which is the inverse of nothing."""
    order = counts(x).argsort(descending=True)
    return m(x[order])[order.argsort(descending=True)]


def sorted_by_the_places(m: Any, x: Tensor) -> Tensor:
    places, _ = counts(x).argsort().sort()
    return m(x[counts(x).argsort()])[places]


ATTACKS = attacks(
    "lookups",
    right={
        "an embedding of ids": lambda m, x: F.embedding(ids(x), m.weight),
        "a row by id": lambda m, x: m.weight[ids(x)],
        "a product with one-hot": lambda m, x: F.one_hot(ids(x), 3).to(x.dtype) @ m.weight,
        "a loss by id": lambda m, x: F.cross_entropy(m(x), ids(x), reduction="none"),
        "a gather by id": lambda m, x: m(x).gather(1, ids(x)[:, None]),
        "a mask by id": lambda m, x: m(x) * (ids(x) > 0)[:, None],
        "where by id": lambda m, x: torch.where((ids(x) > 0)[:, None], m(x), 0.0),
        "positions of features": lambda m, x: m(x) + F.embedding(torch.arange(3) % 3, m.weight).sum(0),
        "a bag of ids": lambda m, x: F.embedding_bag(x.argsort(1), m.weight, mode="sum"),
        "index_select by id": lambda m, x: m.weight.index_select(0, ids(x)),
        "margin of a class": lambda m, x: F.multi_margin_loss(m(x), ids(x), reduction="none"),
        "a sum of losses": lambda m, x: F.cross_entropy(m(x), ids(x), reduction="sum"),
        "take_along_dim": lambda m, x: torch.take_along_dim(m(x), x.argsort(1), 1),
        "take_along_dim, broadcast": lambda m, x: (
            m(x).view(-1, 1, 3).expand(-1, 2, -1).take_along_dim(ids(x)[:, None, None], -1)
        ),
        "take_along_dim by constants": lambda m, x: torch.take_along_dim(m(x), torch.tensor([[2, 0]]), 1),
        "take_along_dim of a parameter": lambda m, x: torch.take_along_dim(m.weight[None], x.argsort(1)[..., None], 1),
        "buckets": lambda m, x: m(x) * torch.bucketize(x, torch.arange(3.0)),
        "places in a sequence": lambda m, x: m(x) * torch.searchsorted(torch.arange(3.0), x),
        "sorted by a count, and back": sorted_by_count,
        "sorted by an argsort, and back": sorted_by_argsort,
        "places in one's own sequence": lambda m, x: m(x) * torch.searchsorted(x.sort(1).values, x.sin()),
        "places in one's own sequence, by a sorter": lambda m, x: (
            m(x) * torch.searchsorted(x, x.sin(), sorter=x.argsort(1), side="right")
        ),
        "constants' places in one's own sequence": lambda m, x: (
            m(x) * torch.searchsorted(x.cumsum(1).contiguous(), torch.zeros(x.shape[0], 3))
        ),
        "places in each step's own sequence": lambda m, x: (
            m(steps(x)) * torch.searchsorted(steps(x).sort(2)[0], steps(x))
        ),
        "a grid of one's own": lambda m, x: F.affine_grid(
            m(steps(x)[:, :2]), [x.shape[0], 1, 2, 3], align_corners=True
        ),
        "an image by a grid of one's own": lambda m, x: F.grid_sample(
            steps(x)[:, None], F.affine_grid(m(steps(x)[:, :2]), [x.shape[0], 1, 2, 3]), align_corners=False
        ),
        "a grid of one's own in space": lambda m, x: F.affine_grid(
            torch.cat([m(steps(x)[:, :3]), x[:, :, None]], 2), [x.shape[0], 1, 2, 3, 2], align_corners=False
        ),
        "smoothed labels": lambda m, x: F.cross_entropy(m(x), ids(x), reduction="sum", label_smoothing=0.1),
    },
    refused={
        "take_along_dim over samples": lambda m, x: torch.take_along_dim(m(x), x.argsort(0), 0),
        "take_along_dim of all": lambda m, x: m(x) * torch.take_along_dim(m(x), torch.tensor([1])),
        "take_along_dim of a row's places": lambda m, x: torch.take_along_dim(m(x), x.argsort(1)[:1], 1),
        "a class for each sample": lambda m, x: F.one_hot(ids(x), x.shape[0]).to(x.dtype) @ m(x),
        "rows within two bounds": lambda m, x: rows_within(m, x, 0.1, 5.0),
        "rows within a bound of another norm": lambda m, x: rows_within(m, x, 0.1, 0.1, p=1.0),
        "rows of samples within a bound": written_and_within,
        "rows within a bound, as other rows": within_and_viewed,
        "rows within a bound of others' reads": within_and_alike,
        "a group norm of other sizes": grouped,
        "the weights of classes in the batch, by a loss": lambda m, x: (
            m(x) * torch.ops.aten.nll_loss_forward(x, ids(x), m.bias.detach(), 1, -100)[1]
        ),
        "whether a sum is zero": lambda m, x: m(x) * x.sum(0).bool(),
        "a sum as bool": lambda m, x: m(x) * x.sum(0, dtype=torch.bool),
        "prototypes": memory,
        "capacity": routed,
        "sorted by a feature": sorted_by_length,
        "sorted by a count, and on": sorted_twice,
        "sorted by a count, and numbered": sorted_by_the_places,
        "sorted by a feature, and back": sorted_and_back,
        "a teacher on other samples": teacher,
        "mixup": mixup,
        "cutmix": cutmix,
        "the hardest negative": hardest_negative,
        "the nearest neighbour": nearest,
        "rows by ids of the batch": lambda m, x: m(x)[ids(x)],
        "samples by ids": lambda m, x: m(x[ids(x)]),
        "an embedding of the batch": lambda m, x: F.embedding(ids(x), x) @ m.weight,
        "the first sample's class": lambda m, x: F.cross_entropy(m(x), ids(x)[:1].expand(x.shape[0]), reduction="none"),
        "the next sample's class": lambda m, x: F.cross_entropy(m(x), ids(x).roll(1, 0), reduction="none"),
        "scaled by frequency": lambda m, x: F.embedding(ids(x), m.weight, scale_grad_by_freq=True),
        "weights by frequency": lambda m, x: m(x) * F.one_hot(ids(x), 3).sum(0),
        "a mask of duplicates": lambda m, x: m(x) * (ids(x)[:, None] == ids(x)[None]).sum(1)[:, None],
        "the previous class": lambda m, x: m(x) + F.embedding(F.pad(ids(x)[:-1], (1, 0)), m.weight),
        "a running count": lambda m, x: m(x) * ids(x).cumsum(0)[:, None],
        "the most frequent class": lambda m, x: m(x) + F.embedding(ids(x).mode().values, m.weight),
        "buckets of the batch": lambda m, x: m(x) * torch.bucketize(x[:, :1], x[:, 0].sort().values),
        "buckets of unsorted samples": lambda m, x: m(x) * torch.bucketize(x[:, 0], x[:, 1])[:, None],
        "places among the means": lambda m, x: m(x) * torch.searchsorted(x.mean(0).sort().values, x),
        "places in each other": lambda m, x: m(x) * torch.searchsorted(x.sort(1).values, x.flip(0)),
        "places of samples in a sequence of all": lambda m, x: (
            m(x) * torch.searchsorted(x.t().sort(1)[0].contiguous(), x.t().contiguous()).t()
        ),
        "places by others' sorter": lambda m, x: m(x) * torch.searchsorted(x, x, sorter=x.flip(0).argsort(1)),
        "constants' places in another's sequence": lambda m, x: (
            m(x) * torch.searchsorted(x.sort(1)[0].flip(0), torch.zeros(x.shape[0], 3))
        ),
        "a grid of all": lambda m, x: F.affine_grid(
            m(steps(x)[:, :2]).mean(0, keepdim=True).expand(x.shape[0], 2, 3).sin(), [x.shape[0], 1, 2, 3]
        ),
        "another's grid": lambda m, x: (
            F.affine_grid(m(steps(x)[:, :2]).flip(0), [x.shape[0], 1, 2, 3]) * x[:, :2, None, None][:, :1]
        ),
        "the largest id": lambda m, x: m(x) * (ids(x) == ids(x).max())[:, None],
        "an id's rank": lambda m, x: m(x) * ids(x).argsort()[:, None],
        "weights of classes in the batch": lambda m, x: F.cross_entropy(
            m(x), ids(x), F.one_hot(ids(x), 3).sum(0).to(x.dtype), reduction="none"
        ),
        "a loss of pairs": lambda m, x: F.cosine_embedding_loss(
            m(x), x.flip(0), torch.ones(x.shape[0]), reduction="none"
        ),
        "a margin of pairs": lambda m, x: F.margin_ranking_loss(
            m(x), m(x).flip(0), torch.ones_like(x), reduction="none"
        ),
    },
)
