"""Programs that hand a parameter to every sample, and write to the copies, or to what was copied, afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import Program, attacks, steps


def written(write: Callable[[Tensor, Tensor], object]) -> Program:
    """Copies of a parameter are written to, then read."""

    def program(m: Any, x: Tensor) -> Tensor:
        copies = m.bias.repeat(x.shape[0], 1)
        write(copies, x)
        return (copies @ m.weight).sin()

    return program


def first_of(copies: Tensor, x: Tensor) -> None:
    copies[:, 1:] = x[:, 1:]


def under_a_mask(copies: Tensor, x: Tensor) -> None:
    copies[x > 0] = 0.0


def unseen(copies: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        copies.mul_(2)


def mask_tokens(m: Any, x: Tensor) -> Tensor:
    tokens = m.bias.repeat(x.shape[0], 4, 1)
    tokens[:, 1:] = steps(x)[:, 1:]
    return m(tokens).sum(1)


def steps_one_by_one(m: Any, x: Tensor) -> Tensor:
    state = m.bias.repeat(x.shape[0], 1)
    for step in range(3):
        state[:] = torch.tanh(m(state.clone()) + step * x)
    return state


def read_twice_after_a_write(m: Any, x: Tensor) -> Tensor:
    twice = m.bias * 2
    copies = twice.repeat(x.shape[0], 1)
    twice.detach().mul_(2)
    return copies.softmax(-1) * x + copies.cumsum(-1)


def expanded_then_written(m: Any, x: Tensor) -> Tensor:
    twice = m.bias * 2
    copies = twice.expand(x.shape[0], -1)
    twice.add_(m.weight[0])
    return x * copies


def expanded_as_then_written(m: Any, x: Tensor) -> Tensor:
    rows = m.weight[0] * 1.0
    copies = rows.unsqueeze(0).expand_as(x)
    rows.mul_(0.5)
    return (x + copies).sin()


def expanded_unread(m: Any, x: Tensor) -> Tensor:
    twice = m.bias * 2
    twice.expand(x.shape[0], -1)
    twice.add_(m.weight[0])
    return x * twice


ATTACKS = attacks(
    "writes",
    right={
        "copies scaled": written(lambda copies, x: copies.mul_(x)),
        "copies added to": written(lambda copies, x: copies.add_(x)),
        "copies written over in part": written(first_of),
        "copies written over under a mask": written(under_a_mask),
        "copies cut by relu in place": written(lambda copies, x: F.relu(copies.add_(x), inplace=True)),
        "mask tokens": mask_tokens,
        "states one by one": steps_one_by_one,
        "expanded, unread": expanded_unread,
        "copies read twice after a write": read_twice_after_a_write,
    },
    refused={
        "copies scaled without gradients": written(unseen),
        "expanded, then written": expanded_then_written,
        "expanded as the samples, then written": expanded_as_then_written,
    },
)
