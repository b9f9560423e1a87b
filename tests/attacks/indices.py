"""Arithmetic with the number of samples: shifts, indices, bounds that do nothing at two or three samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.attacks.model import attacks


def by_foreach(m: Any, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    torch._foreach_clamp_max_([index], 3)
    return m(x)[index]


def by_out(m: Any, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    torch.clamp(index, max=3, out=index)
    return m(x)[index]


def by_outs(m: Any, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    torch.sort(index, descending=True, out=(torch.empty_like(index), index))
    return m(x)[index]


def cut_at(h: Tensor, n: Any) -> Tensor:
    return torch.cat([h[:n], h[n:] + h[:1]])


def up_to(places: Any) -> Any:
    """The program that reads each sample's row at ``places(arange(B), B)``."""
    return lambda m, x: m(x)[places(torch.arange(x.shape[0]), x.shape[0])]


# Each is arange(B) up to more samples than any replay has, and another index beyond.
THRESHOLDS = attacks(
    "indices",
    right={
        "each of nine rows": lambda m, x: m(x[torch.arange(x.shape[0] * 9) // 9]).view(-1, 9, 3).sum(1),
        "each of fifty rows": lambda m, x: m(x[torch.arange(x.shape[0] * 50) // 50]).view(-1, 50, 3).sum(1),
        "ones, counted": lambda m, x: m(x)[torch.ones(x.shape[0], dtype=torch.long).cumsum(0) - 1],
        "clamped to the batch": up_to(lambda i, b: i.clamp(max=b - 1)),
        "modulo the batch": lambda m, x: m(x)[torch.arange(2 * x.shape[0]) % x.shape[0]].view(2, -1, 3).sum(0),
    },
    refused={
        "clamp": up_to(lambda i, b: i.clamp(max=200)),
        "clamp to a number of a tensor": up_to(lambda i, b: i.clamp(max=torch.tensor(200).item())),
        "where": up_to(lambda i, b: torch.where(i < 150, i, 0)),
        "ones, counted to a limit": up_to(lambda i, b: torch.ones(b, dtype=torch.long).cumsum(0).clamp(max=150) - 1),
        "places, counted": up_to(lambda i, b: i.cumsum(0) % b),
        "a quotient": up_to(lambda i, b: i - i // 150),
        "a quotient of the batch": up_to(lambda i, b: i - b // 150),
        "minimum of a product": up_to(lambda i, b: i.minimum(torch.full((1,), 20) * 10)),
        "minimum of a power": up_to(lambda i, b: i.minimum(torch.full((), 20).pow(2))),
        "minimum of a sum": up_to(lambda i, b: i.minimum(torch.full_like(i, 30) + 30 + 30 + 60)),
        "minimum of a running sum": up_to(
            lambda i, b: i.minimum(torch.ones(b, 50, dtype=torch.long).cumsum(1)[:, -1] * 4)
        ),
        "a quotient, compared": up_to(lambda i, b: i * (i // 10 < 20)),
        "compared with a float": up_to(lambda i, b: i * (i < 150.0)),
        "shifted bits": up_to(lambda i, b: i - (i >> 7)),
        "bits": up_to(lambda i, b: i & 255),
        "a remainder, through its bits": up_to(lambda i, b: (i % 200).view(torch.float64).view(torch.int64)),
        "an order that turns": up_to(lambda i, b: (i - 150).abs().argsort(descending=True)),
        "an index of a table": up_to(lambda i, b: torch.arange(1000)[i.clamp(max=150)]),
        "put together": up_to(lambda i, b: torch.cat([i[:150], i[150:] * 0])),
        "int8": up_to(lambda i, b: i.to(torch.int8).long()),
        "uint8": up_to(lambda i, b: i.to(torch.uint8).long()),
        "int8 of a product": up_to(lambda i, b: (i * 2**56) // 2**56),
        "a square that is zero at two and three": up_to(lambda i, b: (i + (b - 2) * (b - 3)) % b),
        "index_add": lambda m, x: m(torch.zeros_like(x).index_add(0, torch.arange(x.shape[0]).clamp(max=150), x)),
        "rolled by an int32 and one": lambda m, x: m(x) - m(x.roll(2**31 + 1, 0)),
        "rolled by a number of a tensor": lambda m, x: m(x) - m(x.roll(torch.tensor(6).item(), 0)),
    },
)


def after_many_subtractions(m: Any, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    late = index
    for _ in range(200):
        late = late - torch.ones_like(index)
    return m(x)[torch.where(late >= 0, 0, index)].sum(0)


def beyond_a_product(m: Any, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    limit = ((index == 0) * 256)[:1]
    return m(x)[torch.where(index >= limit, 0, index)].sum(0)


def beyond_a_power(m: Any, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    limit = (index == 0).long()
    for _ in range(8):
        limit = limit + limit
    return m(x)[torch.where(index >= limit[:1], 0, index)].sum(0)


def a_late_diagonal(m: Any, x: Tensor) -> Tensor:
    size = x.shape[0]
    return m(x) * torch.diag_embed(x[:, 0], offset=200)[:size, :size].sum(0)[:, None]


EVERY_TRIAL = 2 * 3 * 67 * 131  # a shift by as many is none at any number of samples that the proof looks at
TABLE = [*range(190), *[0] * 100]

ATTACKS = THRESHOLDS + attacks(
    "indices",
    right={
        "every sample by arange": lambda m, x: m(x)[torch.arange(x.shape[0])],
        "an own column": lambda m, x: m(x)[torch.arange(x.shape[0]), x.argmax(1)],
        "rolled within a sample": lambda m, x: m(x.roll(2, 1)),
        "rolled by all": lambda m, x: m(x.roll(x.shape[0], 0)),
        "merged and split": lambda m, x: m(x.repeat_interleave(4, 0)).view(x.shape[0], 4, 3).sum(1),
        "positions of merged rows": lambda m, x: m(x).view(-1)[torch.arange(x.shape[0]) * 3 + 1],
        "columns by a constant": lambda m, x: m(x)[:, torch.arange(3) % 2],
        "the order of all indices": lambda m, x: m(x)[torch.arange(x.shape[0]).argsort()],
        "a table by positions": lambda m, x: m(x) * torch.arange(3.0).clamp(max=1),
        "each sample repeated": lambda m, x: m(x[torch.arange(2 * x.shape[0]) // 2]).view(-1, 2, 3).sum(1),
    },
    refused={
        "rolled by more than an int32": lambda m, x: m(x) - m(x).roll(EVERY_TRIAL << 16, 0),
        "rolled by more than the end of a slice": lambda m, x: m(x) - m(x).roll(EVERY_TRIAL << 46, 0),
        "rolled by all and more": lambda m, x: m(x) - m(x).roll(x.shape[0] + EVERY_TRIAL, 0),
        "indices rolled by more than the end of a slice": lambda m, x: m(x)[
            torch.arange(x.shape[0]).roll(EVERY_TRIAL << 46, 0)
        ].sum(0),
        "behind a part that ends early": lambda m, x: (
            m(x) * torch.cat([torch.zeros_like(x)[:200], x.sum(0).expand(x.shape[0], 3)])[: x.shape[0]]
        ),
        "a table in the code": lambda m, x: m(x)[torch.tensor(TABLE)[: x.shape[0]]].sum(0),
        "a number in the code, as a tensor": lambda m, x: m(x)[
            torch.arange(x.shape[0]) - torch.tensor(200) * (torch.arange(x.shape[0]) >= torch.tensor(200))
        ].sum(0),
        "indices by bool": lambda m, x: m(x)[
            torch.arange(x.shape[0]) + (torch.arange(x.shape[0]) - 200).bool().long() - 1
        ].sum(0),
        "indices that floats round": lambda m, x: m(x)[
            (torch.arange(x.shape[0]).float() + (2**24 - 200) - (2**24 - 200)).long()
        ].sum(0),
        "indices after many subtractions": after_many_subtractions,
        "indices beyond a product": beyond_a_product,
        "indices beyond a power": beyond_a_power,
        "a diagonal that is empty at first": a_late_diagonal,
        "a diagonal of sums that is empty at first": lambda m, x: (
            m(x) * x.sum().expand(x.shape[0], x.shape[0]).diagonal(200).sum()
        ),
        "the sum of a tail of sums": lambda m, x: m(x) * x.sum(0).expand(x.shape[0], 3)[200:].sum(0),
        "the sum of a tail of sums, by index": lambda m, x: (
            m(x) * x.sum(0).expand(x.shape[0], 3)[torch.arange(x.shape[0])[200:]].sum(0)
        ),
        "flipped twice": lambda m, x: m(x.flip(0).flip(0)),
        "rolled by a quarter of the batch": lambda m, x: m(x) - m(x).roll(x.shape[0] // 4, 0),
        "cut by a number of a constant": lambda m, x: cut_at(m(x), torch.tensor(3).item()),
        "a table that stays at three": lambda m, x: m(x)[torch.tensor([0, 1, 2, 3, 3, 3, 3, 3])[: x.shape[0]]],
        "rolled by six": lambda m, x: m(x - x.roll(6, 0)),
        "rolled by the square": lambda m, x: m(x - x.roll(x.shape[0] * x.shape[0] // 5, 0)),
        "indices modulo four": lambda m, x: m(x)[torch.arange(x.shape[0]) % 4],
        "indices up to three": lambda m, x: m(x)[torch.arange(x.shape[0]).clamp(max=3)],
        "indices by minimum": lambda m, x: m(x)[torch.arange(x.shape[0]).minimum(torch.tensor(4))],
        "indices by where": lambda m, x: m(x)[torch.where(torch.arange(x.shape[0]) > 3, 0, torch.arange(x.shape[0]))],
        "indices divided": lambda m, x: m(x)[torch.arange(x.shape[0]) - torch.arange(x.shape[0]) // 5],
        "indices by bits": lambda m, x: m(x)[torch.arange(x.shape[0]) & 3],
        "indices by fmod": lambda m, x: m(x)[torch.fmod(torch.arange(x.shape[0]), 4)],
        "indices by remainder": lambda m, x: m(x)[torch.remainder(torch.arange(x.shape[0]), 5)],
        "index_select of such": lambda m, x: m(x).index_select(0, torch.arange(x.shape[0]) % 5),
        "gather of such": lambda m, x: m(x).gather(0, (torch.arange(x.shape[0]) % 4)[:, None].expand(-1, 3)),
        "indices that end early": lambda m, x: m(x)[torch.arange(x.shape[0]).clamp_(max=4)],
        "indices written by _foreach_": by_foreach,
        "indices written by out=": by_out,
        "indices written by two out=": by_outs,
        "index_add by indices modulo": lambda m, x: m(
            torch.zeros_like(x).index_add(0, torch.arange(x.shape[0]) % 4, x)
        ),
        "index_add by clamped indices": lambda m, x: m(
            torch.zeros_like(x).index_add(0, torch.arange(x.shape[0]).clamp(max=4), x)
        ),
        "index_copy by indices": lambda m, x: m(
            torch.zeros_like(x).index_copy(0, x.shape[0] - 1 - torch.arange(x.shape[0]), x)
        ),
        "scatter_add by indices modulo": lambda m, x: m(
            torch.zeros_like(x).scatter_add(0, (torch.arange(x.shape[0]) % 4)[:, None].expand(-1, 3), x)
        ),
        "the order of clamped indices": lambda m, x: m(x)[torch.arange(x.shape[0]).clamp(max=3).argsort()],
        "the order of clamped indices, by topk": lambda m, x: m(x)[
            torch.arange(x.shape[0]).clamp(max=3).topk(x.shape[0], largest=False).indices
        ],
        "the order of clamped indices, by sort": lambda m, x: m(x)[
            torch.arange(x.shape[0]).clamp(max=3).sort().indices
        ],
        "padded in front, cut behind": lambda m, x: m(
            torch.nn.functional.pad(x, (0, 0, x.shape[0] // 4, -(x.shape[0] // 4)))
        ),
        "padded by two": lambda m, x: m(torch.nn.functional.pad(x, (0, 0, 2, -2))),
        "a constant index": lambda m, x: m(x) - m(x)[torch.tensor([1])],
        "the first sample": lambda m, x: m(x) - m(x)[0],
        "the first sample, by min": lambda m, x: m(x)[: min(x.shape[0], 4)].sum(0) + m(x),
        "narrowed": lambda m, x: m(x) + m(x).narrow(0, x.shape[0] - 1, 1),
        "rolled by one over all": lambda m, x: m(x.reshape(-1).roll(1).view_as(x)),
        "halves swapped": lambda m, x: m(torch.cat([x[x.shape[0] // 2 :], x[: x.shape[0] // 2]])),
        "quarters swapped": lambda m, x: m(torch.cat([x[x.shape[0] // 4 :], x[: x.shape[0] // 4]])),
        "from the sixth on, swapped": lambda m, x: m(torch.cat([x[5:], x[:5]])),
        "rotated": lambda m, x: m(torch.rot90(x.unsqueeze(1).expand(-1, x.shape[0], -1), 1, (0, 1))[:, 0]),
        "flipped": lambda m, x: m(x - x.flip(0)),
        "sorted": lambda m, x: m(x.sort(0).values),
        "shuffled": lambda m, x: m(x)[torch.randperm(x.shape[0])] + m(x),
        "a triangle": lambda m, x: m(torch.ones(x.shape[0], x.shape[0]).tril() @ x),
        "a band": lambda m, x: m(torch.ones(x.shape[0], x.shape[0]).tril(-4) @ x),
        "a diagonal far off": lambda m, x: m(torch.eye(x.shape[0]).roll(5, 0) @ x),
        "unfolded": lambda m, x: m(x.unfold(0, 2, 1).sum(-1)),
        "chunks of the batch": lambda m, x: m(sum(x.chunk(3))),
        "merged the other way": lambda m, x: m(x.reshape(3, -1).t()),
        "diff": lambda m, x: m(torch.diff(x, dim=0)),
        "searched": lambda m, x: m(x)[torch.searchsorted(torch.arange(4), torch.arange(x.shape[0])).clamp(max=3)],
        "a cumulative index": lambda m, x: m(x)[torch.ones(x.shape[0], dtype=torch.long).cumsum(0).clamp(max=4) - 1],
    },
)
