"""PyTorch's control flow: scan, map, while_loop and cond, whose bodies are graphs of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.map import map as map_operator
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from tests.attacks.model import attacks


def scanned(combine: Any, x: Tensor) -> Tensor:
    """Scan a sample's columns from zeros; the state and the columns are [B]."""
    return scan(combine, torch.zeros_like(x[:, 0]), x.t().contiguous())[1].t()


def scanned_in_eager(m: Any, x: Tensor, combine: Any) -> Tensor:
    """The operator in a graph, a loop where nothing is compiled."""
    if torch.compiler.is_compiling():
        return m(scanned(combine, x) + x)
    state, columns = torch.zeros_like(x[:, 0]), []
    for column in x.unbind(1):
        state, out = combine(state, column)
        columns.append(out)
    return m(torch.stack(columns, 1) + x)


def mapped(f: Any, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return map_operator(f, x)
    return torch.stack([f(row) for row in x.unbind(0)])


def repeated(condition: Any, body: Any, x: Tensor) -> Tensor:
    state = (torch.zeros((), dtype=torch.long), x)
    if torch.compiler.is_compiling():
        return while_loop(condition, body, state)[1]
    while condition(*state):
        state = body(*state)
    return state[1]


def chosen(predicate: Tensor, one: Any, other: Any, x: Tensor) -> Tensor:
    return torch.cond(predicate, one, other, (x,))


def map_of_the_mean(m: Any, x: Tensor) -> Tensor:
    mean = x.mean(0)
    return m(mapped(lambda row: row - mean, x) + x)


def map_of_a_number(m: Any, x: Tensor) -> Tensor:
    total = x.sum().item()
    return m(mapped(lambda row: row * total, x) + x)


def rows_of_constants(m: Any, x: Tensor) -> Tensor:
    """The state counts rows of a tensor whose first row is constant."""
    rows = torch.cat([torch.zeros(1, 3), x])

    def combine(place: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        return place + 1, rows.index_select(0, place)[0] + unused

    return m(x + scan(combine, torch.zeros(1, dtype=torch.long), torch.zeros(2, 3))[1].sum(0))


def a_sum_in_the_state(m: Any, x: Tensor) -> Tensor:
    """The state holds a sum of samples, and a function of it."""
    h = m(x)

    def combine(state: Any, unused: Tensor) -> Any:
        return (h.sum() + state[1], h.sum().exp()), unused * 1.0

    return scan(combine, (torch.zeros(()), torch.zeros(())), torch.zeros(3, 1))[0][0]


def rows_until_three(m: Any, x: Tensor) -> Tensor:
    rows = torch.cat([torch.zeros(1, 3), x])
    state = (torch.zeros(1, dtype=torch.long), torch.zeros(3))
    found = while_loop(
        lambda place, _: place.sum() < 2,
        lambda place, total: (place + 1, total + rows.index_select(0, place)[0]),
        state,
    )[1]
    return m(x + found)


def repeated_by_a_count(m: Any, x: Tensor) -> Tensor:
    count = x.sum().abs().long().clamp(max=5)
    return m(repeated(lambda i, _: i < count, lambda i, z: (i + 1, z * 1.1 + 1), x))


def repeated_by_a_number(m: Any, x: Tensor) -> Tensor:
    count = x.sum().abs().long().clamp(max=5).item()
    return m(repeated(lambda i, _: i < count, lambda i, z: (i + 1, z * 1.1 + 1), x))


def chosen_by_the_batch_size(m: Any, x: Tensor) -> Tensor:
    return m(torch.cond(x.shape[0] > 200, lambda z: z.flip(0) + 0, lambda z: z + 0, (x,)))


def two_of_which_one_mixes(m: Any, x: Tensor) -> Tensor:
    """Whichever branch runs, one of them adds a mean."""
    mean = x.mean(0)
    return torch.cond(torch.ones(()) > 0, lambda h, r: h + r, lambda h, r: h - r, (m(x), mean))


ATTACKS = attacks(
    "functions",
    right={
        "a state of one's own": lambda m, x: scanned_in_eager(m, x, lambda c, a: (c + a, (c + a) * 1)),
        "rows, mapped": lambda m, x: m(mapped(lambda row: row - row.mean(), x) + x),
        "repeated three times": lambda m, x: m(repeated(lambda i, _: i < 3, lambda i, z: (i + 1, z.tanh() + 1), x)),
    },
    refused={
        "a state that takes the mean": lambda m, x: scanned_in_eager(m, x, lambda c, a: (c + a.mean(0), (c + a) * 1)),
        "a state that is flipped": lambda m, x: scanned_in_eager(m, x, lambda c, a: ((c + a).flip(0), (c + a) * 1)),
        "rows by a counting state": rows_of_constants,
        "a sum in the state": a_sum_in_the_state,
        "rows, mapped with their mean": map_of_the_mean,
        "rows, mapped with a number": map_of_a_number,
        "flipped rows, mapped": lambda m, x: m(mapped(lambda row: row * torch.ones(()), x.flip(0))),
        "flipped three times": lambda m, x: m(repeated(lambda i, _: i < 3, lambda i, z: (i + 1, z.flip(0) + 1), x)),
        "repeated until the sum is large": lambda m, x: m(
            repeated(lambda i, z: z.sum() < 30, lambda i, z: (i + 1, z * 1.1 + 1), x)
        ),
        "repeated by a count": repeated_by_a_count,
        "repeated by a number": repeated_by_a_number,
        "rows until the second": rows_until_three,
        "chosen by a number": lambda m, x: m(chosen(x.sum().item() > 0, torch.sin, torch.cos, x)),
        "chosen by the batch's size": chosen_by_the_batch_size,
        "chosen by a sum of places": lambda m, x: m(
            chosen(torch.arange(x.shape[0]).sum() > 2000, lambda z: z.flip(0) + 0, lambda z: z + 0, x)
        ),
        "two branches of which each mixes": two_of_which_one_mixes,
        "chosen by a symbolic number": lambda m, x: m(x * torch.sym_ite(x.sum().item() > 0, 2, 3)),
    },
)
