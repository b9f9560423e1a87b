"""Packed sequences: how long the longest sample is, which steps lie where, and what padding becomes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.attacks.model import attacks, lengths, steps


def packed(x: Tensor) -> PackedSequence:
    """Pack the steps that each sample has."""
    return pack_padded_sequence(steps(x), lengths(x).cpu(), batch_first=True, enforce_sorted=False)


def padded(x: Tensor, value: float = 0.0) -> Tensor:
    """Pad the samples up to the longest of them [B, T, 3]."""
    return pad_packed_sequence(packed(x), batch_first=True, padding_value=value)[0]


def sorted_by_length(x: Tensor) -> PackedSequence:
    """Pack samples that are sorted already: all have four steps."""
    return pack_padded_sequence(steps(x), torch.full_like(x[:, 0], 4).long().cpu(), batch_first=True)


def with_indices(p: PackedSequence, order: Tensor | None, unsorted: Tensor | None) -> PackedSequence:
    return PackedSequence(p.data * 2, p.batch_sizes, order, unsorted)


def undone_by_nothing(x: Tensor) -> PackedSequence:
    p = packed(x)
    return with_indices(p, p.sorted_indices, every(x))


def all_steps(p: PackedSequence) -> Tensor:
    return pad_packed_sequence(p, batch_first=True, total_length=4)[0]


def every(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def expanded_by_their_number(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    return m(y.unsqueeze(1).expand(-1, y.shape[1], -1, -1).sum(1)[:, 0])


def last_and_one_before_the_first(m: Any, x: Tensor) -> Tensor:
    """The second index may be -1, which is the last step of the longest sample."""
    y = padded(x)
    return m(y[every(x), lengths(x) - 1] + y[every(x), (x[:, 0] > 0).long() - 1])


def divided_by_themselves(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    return m(x + (y * (1 / y)).sum(1).isnan() * x)


def first_pairs_added(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    return m((y.unsqueeze(2) + y.unsqueeze(1)).sum(2)[:, 0])


def first_pairs_of_cosines(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    return m((y.unsqueeze(2) * y.cos().unsqueeze(1)).sum(2)[:, 0])


def first_pairs_of_ones(m: Any, x: Tensor) -> Tensor:
    y, ones = padded(x), padded(x, 1.0)
    return m((y.unsqueeze(2) * ones.unsqueeze(1)).sum(2)[:, 0])


def other_data(m: Any, x: Tensor) -> Tensor:
    p = packed(x)
    return m(all_steps(PackedSequence(p.data.flip(0), p.batch_sizes, p.sorted_indices, p.unsorted_indices))).sum(1)


def order_lost(m: Any, x: Tensor) -> Tensor:
    p = packed(x)
    return m(all_steps(PackedSequence(p.data, p.batch_sizes, None, None))).sum(1)


def column_filled(m: Any, x: Tensor) -> Tensor:
    y = padded(x) + 0
    y[:, :, 0] = 1.0
    return m(y.sum(1))


def added_in_place(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    y.add_(1.0)
    return m(y.sum(1))


def lengths_rewritten(m: Any, x: Tensor) -> Tensor:
    many = lengths(x)
    y = pad_packed_sequence(
        pack_padded_sequence(steps(x), many.cpu(), batch_first=True, enforce_sorted=False), batch_first=True
    )[0]
    many.mul_(0)
    return m(y[every(x), many - 1])


def last_step(m: Any, x: Tensor) -> Tensor:
    many = lengths(x)
    p = pack_padded_sequence(steps(x), many.cpu(), batch_first=True, enforce_sorted=False)
    return m(pad_packed_sequence(p, batch_first=True)[0][every(x), many - 1])


def masked_by_length(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    own = torch.arange(y.shape[1])[None] < lengths(x)[:, None]
    return m((y * own[..., None]).sum(1) / lengths(x)[:, None])


def pooled_by_attention(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    beyond = torch.arange(y.shape[1])[None] >= lengths(x)[:, None]
    return m((y.masked_fill(beyond[..., None], -1e9).softmax(1) * y).sum(1))


def mean_by_mask(m: Any, x: Tensor) -> Tensor:
    y = padded(x)
    return m(y.sum(1) / (y != 0).sum(1).clamp(min=1))


ATTACKS = attacks(
    "lookups",
    right={
        "all steps": lambda m, x: m(all_steps(packed(x))).sum(1),
        "a sum of steps": lambda m, x: m(padded(x).sum(1)),
        "the last step": last_step,
        "the last step, gathered": lambda m, x: m(
            padded(x).gather(1, (lengths(x) - 1)[:, None, None].expand(-1, 1, 3))[:, 0]
        ),
        "the data": lambda m, x: m(packed(x).data).sum(),
        "the mean of its own steps": lambda m, x: m(padded(x).sum(1) / lengths(x)[:, None]),
        "a layer's sum of steps": lambda m, x: F.linear(padded(x), m.weight).sum(1),
        "a function of steps": lambda m, x: m(F.gelu(padded(x)).sum(1)),
        "the mean by a mask of lengths": masked_by_length,
        "the mean by a mask of zeros": mean_by_mask,
        "the order undone by the model": lambda m, x: m(
            all_steps(with_indices(p := packed(x), p.sorted_indices, torch.as_tensor(p.sorted_indices).argsort()))
        ).sum(1),
        "sorted samples without indices": lambda m, x: m(
            all_steps(with_indices(sorted_by_length(x), None, None)) * x[:, None]
        ).sum(1),
        "steps moved, and summed": lambda m, x: m(padded(x).permute(2, 0, 1).sum(2).t()),
    },
    refused={
        # how long the longest sample is
        "a mean of steps": lambda m, x: m(padded(x).mean(1)),
        "the last step of the longest": lambda m, x: m(padded(x)[:, -1]),
        "one step before the last": lambda m, x: m(padded(x)[every(x), lengths(x) - 2]),
        "an index cut at -1": lambda m, x: m(padded(x)[every(x), lengths(x).clamp(min=0, max=-1)]),
        "an index after the lengths were rewritten": lengths_rewritten,
        "steps reversed": lambda m, x: m(padded(x).flip(1)[:, 0]),
        "softmax over steps": lambda m, x: m((padded(x).softmax(1) * padded(x)).sum(1)),
        "a cosine of steps": lambda m, x: m(padded(x).cos().sum(1)),
        "a layer with a bias on steps": lambda m, x: m(padded(x)).sum(1),
        "padding of ones": lambda m, x: m(padded(x).sum(1) + padded(x, 1.0).sum(1)),
        "padding plus one": lambda m, x: m((padded(x) + 1).sum(1)),
        "padding plus one, in place": added_in_place,
        "padding filled": lambda m, x: m(padded(x).masked_fill(padded(x) == 0, 1.0).sum(1)),
        "padding clamped": lambda m, x: m(padded(x).clamp(min=0.5).sum(1)),
        "padding times Inf": lambda m, x: m(x + (padded(x) * float("inf")).isnan().sum(1)),
        "padding as an integer, plus one": lambda m, x: m(x + (padded(x).long() + 1).sum(1)),
        "a column filled": column_filled,
        "the deviation of steps": lambda m, x: m(padded(x).std(1)),
        "the largest of steps": lambda m, x: m(padded(x).amax(1)),
        "times the number of steps": lambda m, x: m(x) * padded(x).shape[1],
        "as many ones as steps": lambda m, x: m(x + x.new_ones(padded(x).shape[1]).sum()),
        "steps expanded by their number": expanded_by_their_number,
        "full of the number of steps": lambda m, x: m(x + torch.full((3,), padded(x).shape[1])),
        "as many zeros as steps, plus one": lambda m, x: m(x + (torch.zeros(padded(x).shape[1]) + 1).sum()),
        "ones like the steps": lambda m, x: m(x + torch.ones_like(padded(x)).sum(1)),
        "cosines of zeros like the steps": lambda m, x: m(x + torch.zeros_like(padded(x)).cos().sum(1)),
        "a constant expanded to the steps": lambda m, x: m(x + torch.ones(1).expand(padded(x).shape[1]).sum()),
        "steps scaled to a length": lambda m, x: m(padded(x).cos().renorm(1, 0, 1.0)[:, 0]),
        "the last step, or one before the first": last_and_one_before_the_first,
        "an undefined sum of steps": lambda m, x: m(x + (padded(x) * float("inf")).sum(1).isnan() * x),
        "steps divided by themselves": divided_by_themselves,
        "the first pairs of steps, added": first_pairs_added,
        "the first pairs of steps and of cosines": first_pairs_of_cosines,
        "the first pairs of steps and of ones": first_pairs_of_ones,
        "a norm, then the last step, though right": lambda m, x: m(
            F.layer_norm(padded(x), (3,))[every(x), lengths(x) - 1]
        ),
        "steps doubled, though right": lambda m, x: m(padded(x).repeat(1, 2, 1).sum(1)),
        "products of steps, though right": lambda m, x: m((padded(x).mT @ padded(x)).sum(1)),
        "attention to its own steps, though right": pooled_by_attention,
        # which steps lie where
        "the mean of the data": lambda m, x: m(x - packed(x).data.mean(0)),
        "the square of the data's sum": lambda m, x: m(packed(x).data).sum().square(),
        "the data's running sum": lambda m, x: m(packed(x).data.cumsum(0)).sum(),
        "the data reversed": other_data,
        "the order lost": order_lost,
        "the order not undone": lambda m, x: m(all_steps(undone_by_nothing(x)).sum(1)),
        "the order not undone, to the longest": lambda m, x: m(
            pad_packed_sequence(undone_by_nothing(x), batch_first=True)[0].sum(1)
        ),
        "the order not undone, of lengths": lambda m, x: m(x) * pad_packed_sequence(undone_by_nothing(x))[1][:, None],
        "the order swapped with what undoes it": lambda m, x: m(
            all_steps(with_indices(p := packed(x), p.unsorted_indices, p.sorted_indices)).sum(1)
        ),
        "the order lost, and undone": lambda m, x: m(
            all_steps(with_indices(p := packed(x), None, p.sorted_indices)).sum(1)
        ),
        "times the number of steps of the longest": lambda m, x: m(x) * len(packed(x).batch_sizes),
        "as many ones as the longest has steps": lambda m, x: m(x + torch.ones(len(packed(x).batch_sizes)).sum()),
        "times the number of all steps": lambda m, x: m(packed(x).data).sum() * packed(x).batch_sizes.sum(),
        "samples sorted by length": lambda m, x: m(x[packed(x).sorted_indices]),
    },
)
