"""Views, reshapes and copies that put one sample's values into another's place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks


def strided_by_less(m: Any, x: Tensor) -> Tensor:
    z = x.contiguous()
    return m(z.as_strided((x.shape[0], 3), (2, 1), 0))


def windows(m: Any, x: Tensor) -> Tensor:
    padded = torch.cat([x[:1], x, x[-1:]])
    return m(padded.unfold(0, 3, 1).mean(-1))


def moved_by_cat(m: Any, x: Tensor) -> Tensor:
    return m(torch.cat([x[-1:], x[:-1]]))


def moved_by_stack(m: Any, x: Tensor) -> Tensor:
    return m(torch.stack([x, x.roll(1, 0)]).mean(0))


def interleaved(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return m(x.repeat(2, 1).view(n, 2, 3).mean(1))


def tiled(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return m(x.tile(2, 1).reshape(n, 2, 3)[:, 1])


def own_repeats(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return m(x.repeat(2, 1)).view(2, n, 3).mean(0)


def own_repeats_inside(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return m(x.repeat_interleave(2, 0)).view(n, 2, 3).mean(1)


def transposed_back(m: Any, x: Tensor) -> Tensor:
    return m(x.t().contiguous().t())


def features_as_samples(m: Any, x: Tensor) -> Tensor:
    return (x.t() @ x).t() @ m.weight


def heads(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return m(x).view(n, 3, 1).transpose(1, 2).reshape(n, 3)


def wrong_heads(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return m(x).view(3, n, 1).transpose(0, 1).reshape(n, 3).tanh() @ m.weight


def shuffled_channels(m: Any, x: Tensor) -> Tensor:
    return m(F.channel_shuffle(x.t().reshape(1, -1, 1, 1), 3).view(-1, 3))


def patches(m: Any, x: Tensor) -> Tensor:
    image = x.view(x.shape[0], 1, 1, 3)
    return m(F.unfold(image, (1, 3)).squeeze(2))


def diagonal_moved(m: Any, x: Tensor) -> Tensor:
    pairs = F.pad(x @ x.t(), (1, 0))[:, :-1]
    return m(pairs.diagonal().unsqueeze(1) * x)


def beside_a_constant(m: Any, x: Tensor) -> Tensor:
    base = x.new_zeros(len(x) + 1, 3)
    first = base[0]
    base[1:] = x
    return m(x + torch.as_strided(first, (3,), (1,), 3))


def beside_a_flat_constant(m: Any, x: Tensor) -> Tensor:
    base = x.new_zeros(x.numel() + 3)
    first = base[:3]
    base[3:] = x.flatten()
    return m(x + first.as_strided((3,), (1,), 3))


def low_bits_cleared(m: Any, x: Tensor) -> Tensor:
    copy = x.clone()
    bits = copy.view(torch.int64)
    bits &= -16
    return m(copy)


def bits_of_the_first(m: Any, x: Tensor) -> Tensor:
    copy = x.clone()
    bits = copy.view(torch.int64)
    bits &= bits[0]
    return m(copy)


def bits_after_a_write(m: Any, x: Tensor) -> Tensor:
    copy = x.clone()
    bits = copy.view(torch.int64)
    copy.mul_(x.mean(0))
    return m(x) * (bits > 0)


def diagonal(values: Tensor) -> Tensor:
    values.fill_diagonal_(0.5)
    return values


ATTACKS = attacks(
    "views",
    right={
        "repeated, and back": own_repeats,
        "repeated inside, and back": own_repeats_inside,
        "transposed, and back": transposed_back,
        "heads of a sample": heads,
        "patches of a sample": patches,
        "channels shuffled to samples": shuffled_channels,
        "expanded": lambda m, x: m(x.unsqueeze(1).expand(-1, 4, -1)).sum(1),
        "read as the same dtype": lambda m, x: m(x.view(x.dtype)),
        "read as integers": lambda m, x: m(x) * x.t().view(torch.int64).sign().t(),
        "written as integers": low_bits_cleared,
        "a diagonal of a constant": lambda m, x: m(x @ diagonal(torch.zeros(3, 3))),
        "a diagonal of a weight": lambda m, x: x @ diagonal(m.weight * 2),
        "flattened": lambda m, x: m(x.unsqueeze(1).expand(-1, 4, -1).reshape(-1, 3)).view(-1, 4, 3).sum(1),
        "chunks of features": lambda m, x: torch.cat([part * 2 for part in m(x).chunk(3, 1)], 1),
        "flipped features": lambda m, x: m(x.flip(1)),
        "stacked with itself": lambda m, x: m(torch.stack([x, x * 2], 1)).sum(1),
        "stacked in front": lambda m, x: m(torch.stack([x, x * 2])).sum(0),
        "cat with itself": lambda m, x: sum(m(torch.cat([x, x * 2])).view(2, -1, 3)),
        "padded features": lambda m, x: m(F.pad(x, (1, 0))[:, :3]),
        "a dimension more": lambda m, x: m(x[None])[0],
        "moved dimensions": lambda m, x: m(x.unsqueeze(2).movedim(0, 2).movedim(2, 0).squeeze(2)),
        "einsum that transposes": lambda m, x: m(torch.einsum("ij->ji", x).t()),
        "unflattened": lambda m, x: m(x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1)).unflatten(0, (-1, 2)).sum(1),
        "split with sizes": lambda m, x: torch.cat([-part for part in m(x).split([1, 2], 1)], 1),
    },
    refused={
        "strided by less": strided_by_less,
        "written as the first's bits": bits_of_the_first,
        "read as integers after a write": bits_after_a_write,
        "read as integers of others": lambda m, x: m(x) * x.view(torch.int64).flip(0).sign(),
        "a diagonal of products": lambda m, x: m(x @ diagonal(x.t() @ x)),
        "a diagonal of samples": lambda m, x: diagonal(m(x)),
        "memory beside a constant": beside_a_constant,
        "memory beside a flat constant": beside_a_flat_constant,
        "windows over samples": windows,
        "moved by cat": moved_by_cat,
        "averaged with the one before": moved_by_stack,
        "repeated, taken for interleaved": interleaved,
        "tiled, taken for interleaved": tiled,
        "features as samples": features_as_samples,
        "heads of other samples": wrong_heads,
        "a diagonal beside that of pairs": diagonal_moved,
        "viewed as three": lambda m, x: m(x.reshape(3, -1).t().contiguous()),
        "columns as rows": lambda m, x: m(x.t().reshape(-1, 3)),
        "expanded from one": lambda m, x: m(x[:1].expand(x.shape[0], -1) + x),
        "expanded from the last": lambda m, x: m(x[-1].expand_as(x) + x),
        "every second, twice": lambda m, x: m(x[::2].repeat_interleave(2, 0)[: x.shape[0]]),
        "reversed by step": lambda m, x: m(x.flip((0, 1))),
        "rolled both ways": lambda m, x: m(x.roll((1, 1), (0, 1))),
        "rolled flat": lambda m, x: m(x.flatten().roll(3).view(-1, 3)),
        "padded around": lambda m, x: m(F.pad(x.t()[None], (1, 0), mode="circular")[0].t()[: x.shape[0]]),
        "padded by reflection": lambda m, x: m(F.pad(x.t()[None], (1, 0), mode="reflect")[0].t()[: x.shape[0]]),
        "triangle of all pairs": lambda m, x: m((x @ x.t()).tril() @ x),
        "kron": lambda m, x: m(torch.kron(x, torch.ones(2, 1))[: x.shape[0]]),
        "block sums": lambda m, x: m(x + x.view(-1, 2, 3).sum(1).repeat_interleave(2, 0)),
        "vstack of halves": lambda m, x: m(torch.vstack([x[x.shape[0] // 2 :], x[: x.shape[0] // 2]])),
        "swapped axes": lambda m, x: m(x.swapaxes(0, 1).reshape(x.shape)),
        "narrowed and padded": lambda m, x: m(F.pad(x.narrow(0, 0, x.shape[0] - 1), (0, 0, 1, 0))),
        "index of its reverse": lambda m, x: m(x[torch.arange(x.shape[0] - 1, -1, -1)]),
        "take": lambda m, x: m(torch.take(x, torch.arange(x.numel()).view_as(x).flip(0))),
        "gathered from the next": lambda m, x: m(
            x.gather(0, (torch.arange(x.shape[0]).sub(1) % x.shape[0])[:, None].expand(-1, 3))
        ),
    },
)
