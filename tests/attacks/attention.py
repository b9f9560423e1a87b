"""Models of tokens as they are written every day, beside those whose tokens look at other samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks, ids, lengths, steps


def embedded(m: Any, x: Tensor) -> Tensor:
    """Embed four ids of each sample [B, 4, 3]."""
    return F.embedding(ids(x), m.weight)


def real(x: Tensor) -> Tensor:
    """Say which of its four steps a sample has [B, 4]."""
    return torch.arange(4)[None] < lengths(x)[:, None]


def every(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def causal(m: Any, x: Tensor) -> Tensor:
    h = m(steps(x))
    later = torch.full((4, 4), float("-inf")).triu(1)
    return ((h @ h.mT + later).softmax(-1) @ h).sum(1)


def masked_mean(m: Any, x: Tensor) -> Tensor:
    mask = real(x)[..., None]
    return (m(embedded(m, x)) * mask).sum(1) / mask.sum(1).clamp(min=1)


def with_a_first_token(m: Any, x: Tensor) -> Tensor:
    return m(torch.cat([m.bias.expand(x.shape[0], 1, 3), steps(x)], 1))[:, 0]


def rotary(m: Any, x: Tensor) -> Tensor:
    h = m(steps(x))
    angle = torch.outer(torch.arange(4.0), torch.ones(3))
    return (h * angle.cos() + h.roll(1, -1) * angle.sin()).sum(1)


def windows(m: Any, x: Tensor) -> Tensor:
    b = x.shape[0]
    parts = m(steps(x).view(b, 2, 2, 3).reshape(-1, 2, 3).softmax(1))
    return parts.view(b, 2, 2, 3).reshape(b, 4, 3).sum(1)


def recurrent(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(x.shape[0], 3)
    for t in range(4):
        state = torch.tanh(m(steps(x)[:, t]) + state)
    return state


def into_slots(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 4, 3)
    for t in range(4):
        out[:, t] = m(steps(x)[:, t])
    return out.sum(1)


def relative(m: Any, x: Tensor) -> Tensor:
    h = steps(x)
    apart = (torch.arange(4)[None] - torch.arange(4)[:, None]).abs().clamp(max=2)
    return ((h @ h.mT + F.embedding(apart, m.weight)[..., 0]).softmax(-1) @ h).sum(1)


def heads(m: Any, x: Tensor) -> Tensor:
    q = m(steps(x)).view(x.shape[0], 4, 3, 1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape[0], 4, 3).sum(1)


def masked_heads(m: Any, x: Tensor) -> Tensor:
    q = m(steps(x))[:, None]
    mask = real(x)[:, None, None].expand(-1, 1, 4, -1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0].sum(1)


def causal_heads(m: Any, x: Tensor) -> Tensor:
    q = m(steps(x))[:, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0].sum(1)


def quantised(m: Any, x: Tensor) -> Tensor:
    h = m(steps(x))
    table = torch.eye(3)
    near = table[torch.cdist(h.flatten(0, 1), table).argmin(1)].view_as(h)
    return (h + (near - h).detach()).sum(1)


def expert(m: Any, x: Tensor) -> Tensor:
    value, chosen = x.softmax(-1).topk(1, -1)
    return m(x) * value + m.weight[chosen[:, 0]]


def counted_by_id(m: Any, x: Tensor) -> Tensor:
    h = steps(x)
    return m(torch.zeros(x.shape[0], 3, 3).scatter_add(1, ids(x)[..., None].expand_as(h), h)).sum(1)


def added_by_sample(m: Any, x: Tensor) -> Tensor:
    whose = every(x).repeat_interleave(4)
    return torch.zeros(x.shape[0], 3).index_add(0, whose, m(steps(x)).flatten(0, 1))


def last_of_the_flat(m: Any, x: Tensor) -> Tensor:
    return m(steps(x)).reshape(-1, 3)[every(x) * 4 + lengths(x) - 1]


def sorted_by_score(m: Any, x: Tensor) -> Tensor:
    h = steps(x)
    order = h.sum(-1).argsort(1)
    return m(h.gather(1, order[..., None].expand_as(h)))[:, 0]


def assigned_by_mask(m: Any, x: Tensor) -> Tensor:
    h = m(steps(x))
    h[ids(x) == 0] = 0.0
    return h.sum(1)


def mean_as_mask(m: Any, x: Tensor) -> Tensor:
    q = m(x)[:, None]
    mask = x.mean(0)[None, None].expand(x.shape[0], 1, 3)[:, :, :1]
    return F.scaled_dot_product_attention(q, q.expand(-1, 3, -1), q.expand(-1, 3, -1), attn_mask=mask + mask.mT)[:, 0]


def samples_as_steps(m: Any, x: Tensor) -> Tensor:
    q = m(steps(x)).transpose(0, 1)
    return F.scaled_dot_product_attention(q, q, q).transpose(0, 1).sum(1)


def samples_as_windows(m: Any, x: Tensor) -> Tensor:
    h = steps(x)
    return m(h.transpose(0, 1).reshape(h.shape)).sum(1)


def keys_of_the_first(m: Any, x: Tensor) -> Tensor:
    q = m(steps(x))
    return F.scaled_dot_product_attention(q, q[:1].expand_as(q), q).sum(1)


def memory_of_the_batch(m: Any, x: Tensor) -> Tensor:
    q = m(steps(x))
    shared = q.mean(0, keepdim=True).expand_as(q)
    return F.scaled_dot_product_attention(q, torch.cat([q, shared], 1), torch.cat([q, shared], 1)).sum(1)


def flattened_causal(m: Any, x: Tensor) -> Tensor:
    """All samples' tokens in one row, as for packed attention, without a mask between samples."""
    q = m(steps(x)).reshape(1, -1, 3)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).view(x.shape[0], 4, 3).sum(1)


def block_mask(m: Any, x: Tensor) -> Tensor:
    """All samples' tokens in one row with a mask between samples, which is no proof."""
    q = m(steps(x)).reshape(1, -1, 3)
    whose = every(x).repeat_interleave(4)
    mask = (whose[:, None] == whose[None])[None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).view(x.shape[0], 4, 3).sum(1)


def steps_of_another(m: Any, x: Tensor) -> Tensor:
    return m(steps(x)[every(x).roll(1), lengths(x) - 1])


def rows_by_a_mask(m: Any, x: Tensor) -> Tensor:
    """Steps are filled with the first sample's, by a mask of one's own."""
    h = steps(x)
    return m(torch.where(real(x)[..., None], h, h[:1])).sum(1)


ATTACKS = attacks(
    "doors",
    right={
        "causal attention": causal,
        "causal heads": causal_heads,
        "heads of tokens": heads,
        "masked heads": masked_heads,
        "relative positions": relative,
        "rotary positions": rotary,
        "windows of tokens": windows,
        "a masked mean of tokens": masked_mean,
        "a first token": with_a_first_token,
        "a recurrence over tokens": recurrent,
        "tokens into slots": into_slots,
        "vector quantisation": quantised,
        "an expert": expert,
        "tokens counted by id": counted_by_id,
        "tokens added by sample": added_by_sample,
        "the last token": lambda m, x: m(steps(x))[every(x), lengths(x) - 1],
        "the last token of the flat": last_of_the_flat,
        "the token of the largest id": lambda m, x: m(embedded(m, x))[every(x), ids(x).argmax(-1)],
        "tokens sorted by a score": sorted_by_score,
        "tokens assigned by a mask": assigned_by_mask,
        "tokens filled by a mask": lambda m, x: m(steps(x)).masked_fill((ids(x) == 0)[..., None], 0.0).sum(1),
        "products of tokens": lambda m, x: m(torch.einsum("bti,btj->bij", steps(x), steps(x))).sum(1),
        "a running sum of tokens": lambda m, x: m(steps(x)).cumsum(1).sum(1),
        "tokens rolled": lambda m, x: m(steps(x).roll(1, 1))[:, 0],
        "a smoothed loss of tokens": lambda m, x: F.cross_entropy(
            m(steps(x)).transpose(1, 2), ids(x), label_smoothing=0.1, reduction="none"
        ).mean(1),
    },
    refused={
        "samples as tokens": samples_as_steps,
        "tokens of other samples": samples_as_windows,
        "the mean as a mask": mean_as_mask,
        "keys of the first sample": keys_of_the_first,
        "keys of the batch": memory_of_the_batch,
        "all tokens in a row": flattened_causal,
        "all tokens in a row, masked, though right": block_mask,
        "the last token of another": steps_of_another,
        "tokens of the first by a mask": rows_by_a_mask,
        "tokens of pairs": lambda m, x: m(torch.einsum("btc,atc->btc", steps(x), steps(x))).sum(1),
        "tokens tiled": lambda m, x: m(steps(x).repeat(2, 1, 1).view(-1, 2, 4, 3).mean(1)).sum(1),
        "a pooled cube": lambda m, x: m(F.avg_pool3d(steps(x)[None], 3, 1, 1)[0]).sum(1),
        "samples as channels of a norm": lambda m, x: m(F.local_response_norm(steps(x)[None], 3)[0]).sum(1),
    },
)
