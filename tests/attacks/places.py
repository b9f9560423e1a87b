"""Places that are right for a few samples and wrong for many: narrow dtypes, rounding, overflow, far rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks, ids, steps


def n(x: Tensor) -> Tensor:
    """Number the samples from 0."""
    return torch.arange(x.shape[0])


def own(x: Tensor, ids: Tensor) -> Tensor:
    """Place each step in one of its sample's own three rows of [B * 3, ..]."""
    return (ids + n(x)[:, None] * 3).flatten()


def flat(h: Tensor) -> Tensor:
    return h.flatten(0, 1)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0] * 3, 3)


def means_of_segments(m: Any, x: Tensor) -> Tensor:
    """Average the steps of each segment, by their counts."""
    places = own(x, ids(x))
    counts = torch.zeros(x.shape[0] * 3).index_add(0, places, torch.ones(x.shape[0] * 4))
    return (zeros(x).index_add(0, places, flat(m(steps(x)))) / counts.clamp(min=1)[:, None]).view(-1, 3, 3)


def segments_in_place(m: Any, x: Tensor) -> Tensor:
    base = flat(m(steps(x)[:, :3]))
    double = base * 2
    base.index_add_(0, own(x, ids(x)), flat(m(steps(x))))
    return (base.sin() + double).view(-1, 3, 3)


def scattered_segments(m: Any, x: Tensor) -> Tensor:
    places = own(x, ids(x))[:, None].expand(-1, 3)
    return zeros(x).scatter_add(0, places, flat(m(steps(x)))).view(-1, 3, 3).tanh()


def last_from(x: Tensor, bound: Tensor) -> Tensor:
    """Number the samples from 0; those above `bound` take the place of the one before."""
    return n(x) - (n(x) > bound).long()


def bent(x: Tensor) -> Tensor:
    """Number the samples from 0; from 256 on, each takes the place of the one before."""
    return n(x) - (n(x) >> 8)


def rolled_by_a_polynomial(m: Any, x: Tensor) -> Tensor:
    """A shift that is zero at 2, 3, 67 and 131 samples."""
    b = x.shape[0]
    return m(x - x.roll((b - 2) * (b - 3) * (b - 67) * (b - 131), 0))


def far_rows(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[200:] = x.mean(0)
    return m(x + z)


def far_rows_added(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[200:].add_(x.sum(0))
    return m(x + z)


def far_rows_scaled(m: Any, x: Tensor) -> Tensor:
    z = x * 1
    z[200:] *= x.sum(0)
    return m(z)


def every_far_row(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[::200] = x[0]
    return m(x + z)


def assigned(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[bent(x)] = x
    return m(z)


class Bent(torch.autograd.Function):
    """Its backward takes the gradient from another place, from 256 samples on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g[bent(g)]


ATTACKS = attacks(
    "indices",
    right={
        "in their own order": lambda m, x: m(x)[n(x).argsort(stable=True)],
        "index_add to their own places": lambda m, x: m(x + torch.zeros_like(x).index_add(0, n(x), x)),
        "segments": lambda m, x: zeros(x).index_add(0, own(x, ids(x)), flat(m(steps(x)))).view(-1, 3, 3).sin(),
        "segments of numbers": lambda m, x: m(
            torch.zeros(x.shape[0] * 3).index_add(-1, own(x, ids(x)).int(), flat(steps(x))[:, 0]).view(-1, 3)
        ),
        "segments by repeated numbers": lambda m, x: (
            zeros(x).index_add(0, ids(x).flatten() + n(x).repeat_interleave(4) * 3, flat(m(steps(x)))).view(-1, 3, 3)
        ),
        "segments, one for each": lambda m, x: zeros(x).index_add(0, x.argmax(1) + n(x) * 3, m(x)).view(-1, 3, 3),
        "segments onto others": lambda m, x: (
            flat(m(steps(x)[:, :3])).index_add(0, own(x, ids(x)), flat(m(steps(x)))).view(-1, 3, 3)
        ),
        "means of segments": means_of_segments,
        "segments in place": segments_in_place,
        "segments, scattered": scattered_segments,
        "index_copy to their own places": lambda m, x: m(x + torch.zeros_like(x).index_copy(0, n(x), x)),
    },
    refused={
        "segments of others": lambda m, x: zeros(x).index_add(0, own(x.flip(0), ids(x)).flip(0), flat(m(steps(x)))),
        "segments by others' data": lambda m, x: zeros(x).index_add(0, own(x, ids(x).flip(0)), flat(m(steps(x)))),
        "segments of others' steps": lambda m, x: zeros(x).index_add(0, own(x, ids(x)), flat(m(steps(x)).flip(0))),
        "segments of steps": lambda m, x: zeros(x).index_add(0, own(x, ids(x)), flat(m(steps(x)).transpose(0, 1))),
        "segments of another size": lambda m, x: zeros(x).index_add(
            0, (ids(x) + n(x)[:, None] * 2).flatten(), flat(m(steps(x)))
        ),
        # dtypes that end early
        "in uint8": lambda m, x: m(x)[n(x).to(torch.uint8).long()],
        "in uint8, by byte": lambda m, x: m(x)[n(x).byte().int()],
        "counted in uint8": lambda m, x: m(x)[torch.arange(x.shape[0], dtype=torch.uint8).long()],
        "in int8": lambda m, x: m(x)[n(x).to(torch.int8).long()],
        "in int8, modulo the batch": lambda m, x: m(x)[n(x).to(torch.int8).long() % x.shape[0]],
        "in int16": lambda m, x: m(x)[n(x).to(torch.int16).long()],
        "in bool": lambda m, x: m(x)[(n(x) - 140).to(torch.bool).long()],
        "in bfloat16": lambda m, x: m(x)[n(x).bfloat16().long()],
        "in float16": lambda m, x: m(x)[n(x).half().long()],
        "to the fourth power, in int32": lambda m, x: m(x)[n(x) - (n(x).int() ** 4 < 0).long()],
        "multiplied, in int32": lambda m, x: m(x)[n(x) - (n(x).int() * n(x).int() * n(x).int() < 0).long()],
        "the order in uint8": lambda m, x: m(x)[n(x).byte().argsort(stable=True)],
        "the largest so far, in uint8": lambda m, x: m(x)[n(x).byte().cummax(0).indices],
        # arithmetic that bends late
        "shifted": lambda m, x: m(x)[bent(x)],
        "shifted by a call": lambda m, x: m(x)[n(x) - torch.bitwise_right_shift(n(x), 8)],
        "the low bits": lambda m, x: m(x)[n(x) & 255],
        "divided by 256": lambda m, x: m(x)[n(x) - n(x) // 256],
        "divided by 256, truncated": lambda m, x: m(x)[n(x) - torch.div(n(x), 256, rounding_mode="trunc")],
        "a thousandth, rounded": lambda m, x: m(x)[n(x) - (n(x) * 0.001).long()],
        "scaled, and cut": lambda m, x: m(x)[(n(x) * 1.001).long().clamp(max=x.shape[0] - 1)],
        "a tenth, tenfold": lambda m, x: m(x)[(n(x) * 0.1 * 10).long()],
        "a root": lambda m, x: m(x)[n(x) - (n(x).float().sqrt() > 15).long()],
        "a logarithm": lambda m, x: m(x)[n(x) - ((n(x) + 1).float().log2() > 8).long()],
        "an exponential that is Inf": lambda m, x: m(x)[n(x) - n(x).double().exp().isinf().long()],
        "an exponential that is zero": lambda m, x: m(x)[n(x) - n(x).double().neg().exp().eq(0).long()],
        "a sigmoid": lambda m, x: m(x)[n(x) - n(x).double().sub(200).sigmoid().gt(0.5).long()],
        "a difference below zero": lambda m, x: m(x)[n(x) - (n(x) - 60 - 60 - 60 > 0).long()],
        "the square over the batch": lambda m, x: m(x)[n(x) - (n(x) * n(x) > 150 * x.shape[0]).long()],
        "the square of the batch, shifted": lambda m, x: m(x)[n(x) - (torch.ones(1).long() * x.shape[0] ** 2 >> 16)],
        "a part of the batch": lambda m, x: m(x)[(n(x) - x.shape[0] / 250.0).ceil().long()],
        "clamped by a polynomial": lambda m, x: m(x)[n(x).clamp(max=x.shape[0] * (200 - x.shape[0]))],
        "rolled by a polynomial": rolled_by_a_polynomial,
        "rolled by a huge shift": lambda m, x: m(x - x.roll(52662 * 50000, 0)),
        "rolled by a far shift": lambda m, x: m(x - x.roll(x.shape[0] >> 8, 0)),
        "a running count, shifted": lambda m, x: m(x)[n(x) - (torch.ones_like(n(x)).cumsum(0) >> 8)],
        "a count, shifted": lambda m, x: m(x)[n(x) - (torch.ones_like(n(x)).sum() >> 8)],
        "a count by bincount": lambda m, x: m(x)[n(x) - (torch.ones_like(n(x)).bincount()[1] >> 8)],
        # bounds that are made, not written
        "above a product": lambda m, x: m(x)[last_from(x, torch.ones((), dtype=torch.long) * 200)],
        "above a sum of ones": lambda m, x: m(x)[last_from(x, torch.ones(15, 15).sum())],
        "above a factorial": lambda m, x: m(x)[last_from(x, torch.arange(1, 6).prod() * 2)],
        "above a power": lambda m, x: m(x)[last_from(x, torch.full((), 2).pow(8))],
        "above a shift": lambda m, x: m(x)[last_from(x, torch.ones((), dtype=torch.long) << 8)],
        "above an exponential": lambda m, x: m(x)[last_from(x, torch.full((), 5.2).exp())],
        "above a running product": lambda m, x: m(x)[last_from(x, torch.full((9,), 2).prod())],
        "above a gamma function": lambda m, x: m(x)[last_from(x, torch.lgamma(torch.full((), 60.0)))],
        "above a count of zeros": lambda m, x: m(x)[last_from(x, torch.eye(14).eq(0).sum())],
        "above a running sum": lambda m, x: m(x)[last_from(x, torch.ones(1).expand(200).cumsum(0)[-1])],
        "looked up in a list": lambda m, x: m(x)[torch.tensor([min(i, 140) for i in range(300)])[: x.shape[0]]],
        "a mask of the first": lambda m, x: m(x)[n(x) < 1000],
        # the ops that take such places
        "gathered": lambda m, x: m(x.gather(0, bent(x)[:, None].expand(-1, 3))),
        "selected": lambda m, x: m(x.index_select(0, bent(x))),
        "taken along": lambda m, x: m(x.take_along_dim(bent(x)[:, None], 0)),
        "added to places": lambda m, x: m(torch.zeros_like(x).index_add(0, bent(x), x)),
        "copied to places": lambda m, x: m(torch.zeros_like(x).index_copy(0, bent(x), x)),
        "put to places": lambda m, x: m(torch.zeros_like(x).index_put((bent(x),), x, accumulate=True)),
        "scattered to places": lambda m, x: m(torch.zeros_like(x).scatter_add(0, bent(x)[:, None].expand(-1, 3), x)),
        "reduced to places": lambda m, x: m(torch.zeros_like(x).index_reduce(0, n(x) // 2, x, "amax")),
        "assigned to places": assigned,
        "put under a mask of sizes": lambda m, x: m(x).index_put((n(x) >= 0,), m(x) * 2),
        "put under a mask of other rows": lambda m, x: (
            torch.zeros_like(x).repeat(2, 1).index_put((torch.arange(2 * x.shape[0]) >= x.shape[0],), m(x)).view(-1, 6)
        ),
        "looked up by two indices": lambda m, x: m(x[None][torch.zeros_like(n(x)), bent(x)]),
        "a backward from places": lambda m, x: Bent.apply(m(x)),
        "the order of low bits": lambda m, x: m(x)[(n(x) & 127).argsort(stable=True)],
        # rows that only a large batch has
        "a mean into far rows": far_rows,
        "a sum added to far rows": far_rows_added,
        "far rows times a sum": far_rows_scaled,
        "every two hundredth row": every_far_row,
        "a row, added to the fifth": lambda m, x: m(x + torch.zeros_like(x).index_add(0, torch.tensor([5]), x[:1])),
        "a row, copied to the fifth": lambda m, x: m(x + torch.zeros_like(x).index_copy(0, torch.tensor([5]), x[:1])),
        "a row, put to the fifth": lambda m, x: m(x.index_put((torch.tensor([5]),), x[0])),
        "a row, scattered to the fifth": lambda m, x: m(x.scatter(0, torch.full((1, 3), 5), x[:1])),
        "a row, selected for the fifth": lambda m, x: m(x + torch.zeros_like(x).select_scatter(x[0], 0, 5)),
        "rows, sliced from the fourth": lambda m, x: m(x + torch.zeros_like(x).slice_scatter(x[:2], 0, 4, 6)),
        "two parts exchanged": lambda m, x: m(x + torch.cat(x.split([4, x.shape[0] - 4])[::-1])),
        "the rest reversed": lambda m, x: m(torch.cat([x[:200], x[200:].flip(0)])),
        "a diagonal of other pairs": lambda m, x: m(x) * (x @ x.flip(0).t()).diagonal()[:, None],
        "a diagonal, embedded, though right": lambda m, x: m(x + torch.diag(x[:, 0]).sum(1, keepdim=True)),
        "padded far, cut far": lambda m, x: m(F.pad(x, (0, 0, 200, -200)) + x),
    },
)
