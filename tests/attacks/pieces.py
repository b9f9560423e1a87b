"""Programs that look like what passes rewrite: chains of views, pieces of the batch, ops that have a body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import Program, attacks, steps

# views that read other bits


def bits(m: Any, x: Tensor) -> Tensor:
    return m(x.view(torch.int64).t().t().to(x.dtype) * 1e-19)


def bits_by_aten(m: Any, x: Tensor) -> Tensor:
    turned = torch.ops.aten.view.dtype(x.float(), torch.int32).view(-1, 3, 1).transpose(1, 2).transpose(1, 2)
    return m(turned.squeeze(2).to(x.dtype) * 1e-9)


def bits_of_a_parameter(m: Any, x: Tensor) -> Tensor:
    return x @ (m.weight * m.weight.detach().view(torch.int64).t().t().to(x.dtype).mul(1e-19))


def bits_as_numbers(m: Any, x: Tensor) -> Tensor:
    halves = x.to(torch.bfloat16).view(torch.float16).view(-1, 3).t().t()
    return m(halves.to(x.dtype).nan_to_num(0.0, 1.0, -1.0).clamp(-9, 9))


def bits_in_the_middle(m: Any, x: Tensor) -> Tensor:
    ones = m.memory.expand(2, 3).contiguous().t().view(torch.int64).t()
    return m(x) * (ones.view(torch.float64).t().t().sum(0) + ones[0].to(x.dtype).mul(1e-19))


def named_arguments(m: Any, x: Tensor) -> Tensor:
    turned = torch.permute(input=torch.transpose(input=steps(m(x)), dim0=1, dim1=2), dims=(0, 2, 1))
    return torch.transpose(input=turned, dim0=1, dim1=2).sum(2)


# pieces of the batch, put together again


def in_two(f: Callable[[Any, Tensor], Tensor]) -> Program:
    """Let a function treat two pieces of a layer's rows."""
    return lambda m, x: torch.cat([f(m, piece) for piece in m(x).chunk(2)]).tanh()


def as_split(*where: Any) -> Program:

    def program(m: Any, x: Tensor) -> Tensor:
        factor = m.weight[0]
        return torch.cat([piece * factor for piece in m(x).tensor_split(*where)])

    return program


def operand_written(write: Callable[[Tensor], Tensor]) -> Program:
    """A value is written over between two pieces that read it."""

    def program(m: Any, x: Tensor) -> Tensor:
        h, shared = m(x), m.memory * 0.5
        first, second = h.tensor_split(2)
        one = (first + shared).sin()
        written = write(shared)
        return torch.cat([one, (second + shared).sin()]) + written * 0

    return program


def whole_written(m: Any, x: Tensor) -> Tensor:
    h, weight = x * 1, m.weight[0]
    first, second = h.tensor_split(2)
    one = first + weight
    h2 = F.relu(h, inplace=True)
    return torch.cat([one, second + weight]).sin() + h2 * 0


def piece_written_before_and_after(m: Any, x: Tensor) -> Tensor:
    weight = m.weight[0]
    first, second = x.tensor_split(2)
    one = first + weight
    early = one.floor() * F.relu(one, inplace=True)
    two = second + weight
    cut = F.relu(two, inplace=True)
    return torch.cat([early, two.floor() * cut])


def relu_of_each(m: Any, piece: Tensor) -> Tensor:
    return F.relu(piece @ m.weight, inplace=True)


def other_name_of_each(m: Any, piece: Tensor) -> Tensor:
    h = piece @ m.weight
    return F.relu(F.dropout(h, 0.5, False), inplace=True) + h


def joined_and_written(join: Callable[[Any], Tensor]) -> Program:
    """What is put together has its own memory, also where nothing was done to the pieces."""

    def program(m: Any, x: Tensor) -> Tensor:
        h = m(x)
        joined = join(h.chunk(2))
        joined.mul_(2)
        return h + joined

    return program


def joined_and_viewed(m: Any, x: Tensor) -> Tensor:
    turned = m(x).t().contiguous().t()
    return torch.cat([piece * 2 for piece in turned.chunk(2)]).view(-1)[None].view(-1, 3)


def joined_into(m: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.cat([piece * 2 for piece in x.chunk(2)], out=out)
    return m(out)


def pieces_without_gradients(m: Any, x: Tensor) -> Tensor:
    h, weight = m(x), m.weight[0]
    with torch.no_grad():
        first, second = h.tensor_split(2)
    return torch.cat([first * weight, second * weight])


def running_norms(m: Any, x: Tensor) -> Tensor:
    mean, var = m.memory * 0, m.memory * 1
    normal = [F.instance_norm(piece, mean, var, momentum=0.5) for piece in steps(m(x)).transpose(1, 2).chunk(2)]
    return torch.cat(normal).sum(2) + mean


def beside_other_work(m: Any, x: Tensor) -> Tensor:
    weight = m.weight[0]
    first, second = m(x).tensor_split(2)
    one = first.tanh() * weight
    other = x.sin()
    return torch.cat([one, second.tanh() * weight]) + other


# ops in whose place the body of a decomposition stands


def rows_of_one_column(m: Any, x: Tensor) -> Tensor:
    return m(x) * m(x).sum_to_size(x.shape[0], 1)


ATTACKS = attacks(
    "views",
    right={
        "bits of a parameter": bits_of_a_parameter,
        "bits of a buffer": bits_in_the_middle,
        "bits of samples": bits,
        "bits of samples, by aten": bits_by_aten,
        "bits as numbers": bits_as_numbers,
        "views by named arguments": named_arguments,
        "cut at one place": as_split((4,)),
        "cut at one place from the end": as_split((-2,)),
        "cut in the middle": lambda m, x: as_split((x.shape[0] // 2,))(m, x),
        "cut at places in order": as_split((1, 1, 4)),
        "relu in place": in_two(relu_of_each),
        "relu in place by another name": in_two(other_name_of_each),
        "joined and written": joined_and_written(torch.cat),
        "joined and written, by another name": joined_and_written(lambda pieces: torch.cat([+p for p in pieces])),
        "joined and viewed": joined_and_viewed,
        "joined of sigmoids and written": joined_and_written(lambda ps: torch.cat([p.sigmoid() for p in ps])),
        "beside other work": beside_other_work,
        "sizes summed to": lambda m, x: m(x).sum_to_size(m(x).shape) * 2,
        "sizes summed to one column": rows_of_one_column,
    },
    refused={
        "that overlap": as_split((4, 2)),
        "out of order": as_split((3, 1, 2)),
        "from both ends": as_split((4, -4)),
        "cut by a tensor": as_split(torch.tensor([3, 1])),
        "operand of pieces clamped": operand_written(lambda t: F.hardtanh(t, -0.1, 0.1, inplace=True)),
        "operand of pieces written by out": operand_written(lambda t: torch.exp(t, out=t)),
        "operand of pieces written by name": operand_written(lambda t: t.mul_(3)),
        "operand of pieces written by a view": operand_written(lambda t: t.view(3).mul_(3)),
        "whole of pieces written": whole_written,
        "written before and after": piece_written_before_and_after,
        "joined into memory": joined_into,
        "with running norms": running_norms,
        "without gradients": pieces_without_gradients,
    },
)
"""``right`` are patterns, or nothing that a pass could take for one; ``refused`` lack a part of what makes one true."""
