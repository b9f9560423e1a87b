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


ATTACKS = attacks(
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
        "flipped twice": lambda m, x: m(x.flip(0).flip(0)),
        "rolled by a quarter of the batch": lambda m, x: m(x) - m(x).roll(x.shape[0] // 4, 0),
        "rolled by more than 32 bits": lambda m, x: m(x - x.roll(2**33 + 1, 0)),
        "rolled by a number of a constant": lambda m, x: m(x - x.roll(torch.tensor(6).item(), 0)),
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
