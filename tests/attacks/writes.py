"""Writes into memory that samples share: through views, `out=`, lists of tensors, buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.attacks.model import attacks


@torch.library.custom_op("attacks::write", mutates_args=("z",))
def write(z: Tensor, r: Tensor) -> None:
    """Write r into z, as an op that fxgrad does not know."""
    z.copy_(r)


@write.register_fake
def _(z: Tensor, r: Tensor) -> None:
    return None


def onto_the_next(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[1:] += x[:-1].clone()
    return m(z)


def add_onto_all_but_one(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[:-1].add_(x[-1:])
    return m(z)


def first_of_all(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[0] = x.sum(0)
    return m(z)


def first_of_all_by_copy(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[0].copy_(x.sum(0))
    return m(z)


def detached_view(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h.detach()[0].add_(x.sum(0))
    return h.tanh()


def data_view(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.data[0].add_(x[1])
    return m(z)


def out_of_mean(m: Any, x: Tensor) -> Tensor:
    found = torch.empty(3)
    torch.mean(x, 0, out=found)
    return m(x - found)


def out_of_mm(m: Any, x: Tensor) -> Tensor:
    found = torch.empty(3, 3)
    torch.mm(x.t(), x, out=found)
    return m(x @ found)


def out_of_add(m: Any, x: Tensor) -> Tensor:
    found = torch.empty_like(x)
    torch.add(x, x.roll(1, 0), out=found)
    return m(found)


def out_of_max(m: Any, x: Tensor) -> Tensor:
    values, places = torch.empty(3), torch.empty(3, dtype=torch.long)
    torch.max(x, 0, out=(values, places))
    return m(x - values)


def foreach(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros(3)
    torch._foreach_add_([found], [x.sum(0)])
    return m(x - found)


def foreach_of_rows(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    torch._foreach_add_([z[0]], [x[1]])
    return m(z)


def foreach_mul(m: Any, x: Tensor) -> Tensor:
    found = torch.ones(3)
    torch._foreach_mul_([found], x.abs().max())
    return m(x * found)


def zeros_of_all(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros(3)
    found += x.mean(0)
    return m(x - found)


def zeros_by_add(m: Any, x: Tensor) -> Tensor:
    found = x.new_zeros(3)
    found.add_(x.mean(0))
    return m(x - found)


def by_copy(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found.copy_(x.flip(0))
    return m(found)


def by_copy_of_a_mean(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found.copy_(x.mean(0))
    return m(x - found)


def slot(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros(1)
    found[0] = x.sum()
    return m(x * found)


def through_reshape(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.view(-1)[3:].add_(x.reshape(-1)[:-3].clone())
    return m(z)


def through_transpose(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.t()[:, 1:].add_(x.t()[:, :-1])
    return m(z)


def through_select(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.select(0, 0).add_(x.select(0, 1))
    return m(z)


def through_narrow(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.narrow(0, 1, x.shape[0] - 1).add_(x.narrow(0, 0, x.shape[0] - 1))
    return m(z)


def through_strides(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[::2].add_(x.sum(0))
    return m(z)


def through_as_strided(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.as_strided((3,), (1,), 0).add_(x.sum(0))
    return m(z)


def through_diagonal(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.diagonal().add_(x.sum(0)[0])
    return m(z)


def index_add(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.index_add_(0, torch.tensor([0]), x.sum(0, keepdim=True))
    return m(z)


def index_copy(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.index_copy_(0, torch.tensor([0, 1]), x[[1, 0]])
    return m(z)


def index_put(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.index_put_((torch.tensor([0]),), x[1:2])
    return m(z)


def scatter(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.scatter_add_(0, torch.zeros_like(x, dtype=torch.long), x)
    return m(z)


def masked_by_another(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.masked_scatter_(x > 0, x.flip(0))
    return m(z)


def clamped_row(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[1:].clamp_(max=x.mean())
    return m(z)


def written_input(m: Any, x: Tensor) -> Tensor:
    z = x * 1
    z[1:] = z[:-1].clone()
    return m(z)


def swapped(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[[0, 1]] = z[[1, 0]]
    return m(z)


def cumulated_in_place(m: Any, x: Tensor) -> Tensor:
    return m(x.clone().cumsum_(0))


def addmm_in_place(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros(3, 3)
    found.addmm_(x.t(), x)
    return m(x @ found)


def set_of_rows(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[1:] = x[:-1]
    return m(z)


def by_custom_op(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    torch.ops.attacks.write(found, x.flip(0))
    return m(x + found)


def a_mean_by_custom_op(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros(3)
    torch.ops.attacks.write.default(found, x.mean(0))
    return m(x - found)


def a_parameter_by_foreach(m: Any, x: Tensor) -> Tensor:
    found = torch.ones(3)
    torch._foreach_mul_([found], [m.bias])
    return m(x) * found


def a_parameter_by_foreach_without_gradient(m: Any, x: Tensor) -> Tensor:
    found = torch.ones(3)
    torch._foreach_mul_([found], [m.bias.detach()])
    return m(x) * found


# right


def own_column(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[:, 0] += x[:, 1]
    return m(z)


def own_columns_shifted(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z[:, 1:] += x[:, :-1].clone()
    return m(z)


def own_row_filled(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z.copy_(x)
    return m(z)


def own_scaled(m: Any, x: Tensor) -> Tensor:
    return m(x.clone().mul_(2).add_(x))


def own_column_of_a_layer(m: Any, x: Tensor) -> Tensor:
    h = m(x).clone()
    h[:, 0] = 0
    return h.tanh()


def a_constant_written(m: Any, x: Tensor) -> Tensor:
    found = torch.zeros(3)
    found[0] = 2.0
    found.add_(1)
    return m(x * found)


def own_scatter(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.scatter_add_(1, torch.zeros_like(x, dtype=torch.long), x)
    return m(z)


def own_index_add(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    z.index_add_(1, torch.tensor([0, 0, 1]), x)
    return m(z)


def own_cumsum(m: Any, x: Tensor) -> Tensor:
    return m(x.clone().cumsum_(1))


def written_into(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """The program that writes into a copy of x, and goes on with it."""

    def program(m: Any, x: Tensor) -> Tensor:
        z = x.clone()
        write(z, x)
        return m(z)

    return program


def every_second_row(m: Any, x: Tensor) -> Tensor:
    z = torch.empty(2 * x.shape[0], 3)
    z[0::2].copy_(x)
    z[1::2].copy_(2 * x)
    return m(z).view(-1, 2, 3).sum(1)


def one_block_of_many(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros(200, x.shape[0], 3)
    z[100].copy_(x)
    return m(z[100] + z[0])


# What is written, or the place of it, is empty for fewer samples than the number in it.
PLACES = attacks(
    "writes",
    right={
        "far columns": lambda m, x: m(torch.zeros(x.shape[0], 400)[:, 300:303].copy_(x)),
        "every second row": every_second_row,
        "one block of many": one_block_of_many,
    },
    refused={
        "a mean, from the fifth sample on": written_into(lambda z, x: z[4:].add_(x.mean(0))),
        "a mean, far behind": written_into(lambda z, x: z[150:].add_(x.mean(0))),
        "zeros, far behind": written_into(lambda z, x: z[150:].zero_()),
        "samples moved by many": written_into(lambda z, x: z[150:].add_(x[:-150])),
        "the last ones onto a quarter": written_into(
            lambda z, x: z[: x.shape[0] // 4].add_(x[x.shape[0] - x.shape[0] // 4 :])
        ),
        "a mean onto a part": written_into(lambda z, x: z[: x.shape[0] // 150].add_(x.mean(0))),
        "a mean behind a minimum": written_into(lambda z, x: z[min(x.shape[0], 150) :].add_(x.mean(0))),
    },
)

ATTACKS = PLACES + attacks(
    "writes",
    right={
        "a column": own_column,
        "columns, shifted": own_columns_shifted,
        "all of it": own_row_filled,
        "scaled in place": own_scaled,
        "a column of a layer's output": own_column_of_a_layer,
        "a constant": a_constant_written,
        "scatter_add within a sample": own_scatter,
        "index_add within a sample": own_index_add,
        "cumsum within a sample": own_cumsum,
        "a parameter by _foreach_mul_": a_parameter_by_foreach,
        "a detached parameter by _foreach_mul_": a_parameter_by_foreach_without_gradient,
        "a parameter into each sample": lambda m, x: torch.select_scatter(x, m.bias[:1].expand(x.shape[0]), 1, 0),
    },
    refused={
        "each sample onto the next": onto_the_next,
        "the last onto all others": add_onto_all_but_one,
        "the sum into the first": first_of_all,
        "the sum into the first, by copy_": first_of_all_by_copy,
        "through detach": detached_view,
        "through data": data_view,
        "out= of a mean": out_of_mean,
        "out= of a product": out_of_mm,
        "out= of an addition": out_of_add,
        "out= of max": out_of_max,
        "_foreach_add_": foreach,
        "_foreach_add_ of rows": foreach_of_rows,
        "_foreach_mul_ by a tensor": foreach_mul,
        "zeros that take a mean": zeros_of_all,
        "zeros that take a mean, by add_": zeros_by_add,
        "copy_ of flipped samples": by_copy,
        "copy_ of a mean": by_copy_of_a_mean,
        "a slot for the sum": slot,
        "through reshape": through_reshape,
        "through transpose": through_transpose,
        "through select": through_select,
        "through narrow": through_narrow,
        "every second sample": through_strides,
        "through as_strided": through_as_strided,
        "through diagonal": through_diagonal,
        "index_add_": index_add,
        "index_copy_": index_copy,
        "index_put_": index_put,
        "scatter_add_ over samples": scatter,
        "masked_scatter_": masked_by_another,
        "clamp_ of rows at the mean": clamped_row,
        "samples moved by one": written_input,
        "two samples swapped": swapped,
        "cumsum_ over samples": cumulated_in_place,
        "addmm_": addmm_in_place,
        "zeros that take samples moved by one": set_of_rows,
        "a custom op that writes": by_custom_op,
        "a custom op that writes a mean": a_mean_by_custom_op,
        "a parameter into the first sample": lambda m, x: torch.diagonal_scatter(m(x), m.bias[:1], 2),
    },
)
