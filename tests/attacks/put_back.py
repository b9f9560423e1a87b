"""Programs that look like what passes rewrite: places under a mask, written back, and rows in an order, put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import Program, attacks, ids, steps

# places under a mask, written back


def masked(f: Callable[[Tensor], Tensor]) -> Program:
    """What a function makes of a layer's values at some places is put where they were."""

    def program(m: Any, x: Tensor) -> Tensor:
        h, mask = m(x), x > 0
        h[mask] = f(h[mask])
        return h

    return program


def scaled_as(name: Callable[[Tensor], Tensor]) -> Program:
    def scaled(t: Tensor) -> Tensor:
        name(t).mul_(2)
        return t

    return masked(scaled)


def read_as(name: Callable[[Tensor], Tensor]) -> Program:
    def read(t: Tensor) -> Tensor:
        other = name(t)
        t.mul_(2)
        return other + t

    return masked(read)


def then_itself(write: Callable[[Tensor], Any]) -> Program:
    def written(t: Tensor) -> Tensor:
        write(t)
        return t

    return masked(written)


def without_gradients(t: Tensor) -> None:
    with torch.no_grad():
        t.mul_(2)


def a_row_scaled_by_a_parameter(m: Any, x: Tensor) -> Tensor:
    h, mask = m(x), x.sum(1) > 0
    with torch.no_grad():
        h = h * 1
        h[mask] *= m.weight[0]
    return h * m(x)


def normal_rows(m: Any, x: Tensor) -> Tensor:
    h, mask = m(x), x.sum(1) > 0
    h[mask] = F.layer_norm(h[mask], (3,), m.weight[0], m.bias)
    return h


def complex_scaled(m: Any, x: Tensor) -> Tensor:
    h, mask = torch.complex(m(x), x), x > 0
    h[mask] *= 2j
    return torch.view_as_real(h).sum(2)


def one_after_another(m: Any, x: Tensor) -> Tensor:
    h = m(x).clone()
    h[h > 0] *= 2
    h[h < 0] = torch.mul(h[h < 0], other=h[h < 0])
    return h


def two_masks(first: Callable[[Tensor], Any], second: Callable[[Tensor], Any], early: bool = False) -> Program:
    """A mask is made twice; either is written over before it is used."""

    def program(m: Any, x: Tensor) -> Tensor:
        x = x[:, :2]
        h = (x @ m.weight[:2, :2]).clone()
        one = x > x.flip(1)
        if early:
            other = x > x.flip(1)
        first(one)
        values = h[one] * 2
        if not early:
            other = x > x.flip(1)
        second(other)
        h[other] = values
        return h

    return program


def nothing(t: Tensor) -> None:
    pass


def a_parameter_under_a_mask(m: Any, x: Tensor) -> Tensor:
    weight, mask = m.weight * 2, torch.ones_like(m.weight).tril() > 0
    part = weight[mask]
    part.view(-1).mul_(3)
    weight[mask] = part
    return x @ weight


def a_parameter_read_beside(m: Any, x: Tensor) -> Tensor:
    weight, mask = m.weight * 2, torch.ones_like(m.weight).tril() > 0
    part = weight[mask]
    part.mul_(3)
    total = part.sum()
    weight[mask] = part
    return x @ weight * total


def complex_places(m: Any, x: Tensor) -> Tensor:
    h, mask = torch.complex(m(x), x), x > 0
    part = h[mask]
    other = part.conj()
    part.mul_(2j)
    h[mask] = other
    return torch.view_as_real(h).sum(2)


# rows in an order, put back by its inverse


def put_back(inverse: Callable[[Tensor], Tensor], after: Callable[[Tensor, Tensor], Any] | None = None) -> Program:
    """Rows sorted by a number, and put back by an inverse that is made of the order."""

    def program(m: Any, x: Tensor) -> Tensor:
        numbers = ids(x).reshape(-1)
        sorted_numbers, order = numbers.sort()
        rows = m(steps(x).reshape(-1, 3)[order])
        places = inverse(order)
        if after is not None:
            after(numbers, order)
            rows = rows * (sorted_numbers[:, None] + 1)
        return (rows[places].view(-1, 4, 3) * torch.arange(4)[:, None]).sum(1)

    return program


def counted(like: Tensor) -> Tensor:
    return torch.arange(like.shape[0])


def assigned(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = counted(order)
    return inverse


def put(order: Tensor) -> Tensor:
    return torch.zeros_like(order).index_put((order,), counted(order))


def accumulated(order: Tensor) -> Tensor:
    inverse = torch.full_like(order, -1)
    return inverse.index_put_((order,), counted(order), accumulate=True)


def base_read_before(order: Tensor) -> Tensor:
    inverse = torch.zeros_like(order)
    before = inverse + 1
    inverse[order] = counted(order)
    return (inverse + before) % order.shape[0]


def base_of_an_earlier_name(order: Tensor) -> Tensor:
    inverse = torch.zeros_like(order)
    name = inverse.view(-1)
    inverse[order] = counted(order)
    return (inverse + name) // 2


def put_beside_its_base(order: Tensor) -> Tensor:
    base = torch.zeros_like(order)
    inverse = base.index_put((order,), counted(order))
    return (inverse + base + 1) % order.shape[0]


def numbers_written(order: Tensor) -> Tensor:
    numbers = counted(order)
    numbers.copy_(numbers.flip(0))
    inverse = torch.empty_like(order)
    inverse[order] = numbers
    return inverse


def longer_base(order: Tensor) -> Tensor:
    inverse = torch.zeros(order.shape[0] + 4, dtype=torch.int64)
    inverse[order] = counted(order)
    return inverse[4:]


def longer_base_whole(order: Tensor) -> Tensor:
    inverse = torch.zeros(2 * order.shape[0], dtype=torch.int64)
    inverse[order] = counted(order)
    return inverse


def written_by_out(order: Tensor) -> Tensor:
    inverse = order.argsort()
    torch.add(order, 0, out=inverse)
    return inverse


def order_by_out(order: Tensor) -> Tensor:
    inverse = order.argsort()
    torch.sub(counted(order).flip(0), 0, out=order)
    return inverse


def infinite_at_one(m: Any, x: Tensor) -> Tensor:
    h, some = m(x).tanh() * 0.9, x[:, 0] > 0
    h[some] = F.layer_norm(h[some].atanh(), (3,), m.bias)
    return h


ATTACKS = attacks(
    "writes",
    right={
        "places scaled as dropout": scaled_as(lambda t: F.dropout(t, 0.5, False)),
        "places scaled": then_itself(lambda t: t.mul_(2)),
        "places scaled as to": scaled_as(lambda t: t.to(t.dtype)),
        "places scaled as positive": scaled_as(lambda t: +t),
        "places scaled as real": scaled_as(lambda t: t.real),
        "places scaled as two names": scaled_as(lambda t: +(+t).to(t.dtype)),
        "places read as to": read_as(lambda t: t.type_as(t)),
        "places read as conj": read_as(torch.conj),
        "places of relu in place": masked(lambda t: F.relu(t, inplace=True)),
        "places of elu in place": masked(lambda t: F.elu(t, inplace=True)),
        "places of hardtanh in place": masked(lambda t: F.hardtanh(t, -0.5, 0.5, True)),
        "places of leaky relu in place": masked(lambda t: F.leaky_relu(t, 0.2, inplace=True)),
        "places of leaky_relu_": masked(lambda t: F.leaky_relu_(t, 0.2)),
        "places of elu_": masked(lambda t: F.elu_(t * 2)),
        "places of a threshold": masked(lambda t: F.threshold(t, 0.1, 0.5, inplace=True)),
        "places of aten.relu_": masked(lambda t: torch.ops.aten.relu_(t)),
        "places written over by relu": then_itself(lambda t: F.relu(t, inplace=True)),
        "places of aten.elu_": masked(lambda t: torch.ops.aten.elu_(t, 1.5, 2.0, 0.5)),
        "places scaled by parameters without gradients": a_row_scaled_by_a_parameter,
        "places one after another": one_after_another,
        "places of complex numbers scaled": complex_scaled,
        "places of normal rows": normal_rows,
        "places of normal rows of what is infinite at one": infinite_at_one,
        "places under masks made twice": two_masks(nothing, nothing),
        "sorted rows put back": put_back(assigned),
        "sorted rows put back by put": put_back(put),
    },
    refused={
        "places under a mask written late": two_masks(nothing, Tensor.logical_not_),
        "places under a mask written early": two_masks(Tensor.logical_not_, nothing, early=True),
        "places under masks written": two_masks(Tensor.logical_not_, Tensor.logical_not_, early=True),
        "places filled": then_itself(lambda t: t.fill_(2.0)),
        "places copied to": then_itself(lambda t: t.copy_(t * 2)),
        "places written by a view": then_itself(lambda t: t.view(-1).mul_(2)),
        "places written by detach": then_itself(lambda t: t.detach().mul_(2)),
        "places written by out": then_itself(lambda t: torch.mul(t, 2, out=t)),
        "places written in part": then_itself(lambda t: t[:0].zero_()),
        "places written without gradients": then_itself(without_gradients),
        "places that are complex": complex_places,
        "sorted rows put back by a sum": put_back(accumulated),
        "sorted rows, a base read before": put_back(base_read_before),
        "sorted rows, a base by another name": put_back(base_of_an_earlier_name),
        "sorted rows, a base beside what was put": put_back(put_beside_its_base),
        "sorted rows, numbers written": put_back(numbers_written),
        "sorted rows, a longer base": put_back(longer_base),
        "sorted rows, a longer base whole": put_back(longer_base_whole),
        "sorted rows, an inverse written by out": put_back(written_by_out),
        "sorted rows, an order written by out": put_back(order_by_out),
        "sorted rows, numbers written later": put_back(assigned, lambda numbers, order: numbers.mul_(0)),
        "sorted rows, an order written later": put_back(assigned, lambda numbers, order: order.mul_(0)),
    },
)
"""``right`` are patterns, or nothing that a pass could take for one; ``refused`` lack a part of what makes one true."""
