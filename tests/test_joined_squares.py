"""Sums of squares of many layers' rows by one operator, in the graphs that Inductor gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxgrad
from fxgrad.compile.joined_squares import join_squares
from fxgrad.kernels.many_squares import squares_of_many
from fxgrad.kernels.norms import FEW, sum_squares

SQUARES, MANY = torch.ops.fxgrad.sum_squares.default, torch.ops.fxgrad.squares_of_many.default


# The kernel


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (16,), (33,), (300,), (3, 5), (1, 1000)], ids=str)
def test_sums_of_squares(n: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(n, *shape), torch.randn(n, 2, *shape)[:, 1], torch.randn(n, 4)]
    expected = torch.stack([matrix.double().square().flatten(1).sum(1) for matrix in matrices])
    torch.testing.assert_close(squares_of_many(matrices), expected, rtol=1e-14, atol=0)


def test_other_layouts_and_dtypes() -> None:
    torch.manual_seed(0)
    for matrices in (
        [torch.randn(4, 3).t(), torch.randn(3, 6)],
        [torch.randn(3, 6)[:, ::2], torch.randn(3, 6)],
        [torch.randn(3, 4, dtype=torch.float64)],
        [torch.randn(3, 4, dtype=torch.bfloat16)],
        [torch.randn(3, 0), torch.randn(3, 4)],
        [torch.randn(0, 4), torch.randn(0, 2)],
        [torch.randn(3, 1, 2).expand(3, 4, 2)],
    ):
        expected = torch.stack([matrix.double().square().flatten(1).sum(1) for matrix in matrices])
        torch.testing.assert_close(squares_of_many(matrices), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [1e-30, 1e30, 3e38, math.inf, math.nan, 1e-45])
def test_values_at_the_edges_of_float32(value: float) -> None:
    """Squares that float32 cannot hold; a value that is none stays in its sample."""
    rows = torch.ones(3, 21)
    rows[1, 20] = value
    (found,) = squares_of_many([rows])
    expected = rows.double().square().sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0, equal_nan=True)
    assert found[0] == found[2] == 21


# The graph


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(function)(*(mode.from_tensor(one) for one in inputs))


def calls(gm: fx.GraphModule, op: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=op))


def scaled(*rows: Tensor) -> list[Tensor]:
    """Each tensor over the length of all, as in clipping: tensors are needed again."""
    total = torch.ops.fxgrad.root_of_many.default([sum_squares(one).expand(2, -1) for one in rows], False)[0]
    return [one / total.unsqueeze(1) for one in rows]


def check(function: Callable[..., Any], inputs: list[Tensor], joined: int) -> fx.GraphModule:
    gm = traced(function, *inputs)
    expected = gm(*inputs)
    before = calls(gm, SQUARES)
    join_squares(gm)
    gm.graph.lint()
    assert calls(gm, MANY) == (joined > 0)
    assert joined == 0 or calls(gm, SQUARES) <= before - joined
    torch.testing.assert_close(gm(*inputs), expected)
    return gm


def test_many_are_one_call() -> None:
    rows = [torch.randn(3, 4 + i) for i in range(FEW + 1)]
    gm = check(scaled, rows, FEW + 1)
    assert calls(gm, torch.ops.fxgrad.root_of_many.default) == 1  # of twelve layers, g++ takes 45 s for a loop
    check(scaled, rows[:-1], 0)


def test_the_same_rows_are_summed_once() -> None:
    def twice(x: Tensor) -> Tensor:
        return sum_squares(x) + sum_squares(x.unsqueeze(1)) + sum_squares(x.view(3, 1, 4))

    gm = traced(twice, torch.randn(3, 4))
    join_squares(gm)
    assert calls(gm, SQUARES) == 1


def test_other_rows_in_the_same_memory_are_not_the_same() -> None:
    def both(x: Tensor) -> Tensor:
        return sum_squares(x).sum() + sum_squares(x.view(4, 3)).sum() + sum_squares(x.t().unsqueeze(1)).sum()

    gm = traced(both, torch.randn(3, 4))
    join_squares(gm)
    assert calls(gm, SQUARES) == 3


def test_norms_alone_hold_no_rows() -> None:
    """Nothing behind the norms needs the rows: they would be kept to the end for one call."""

    def norms(*rows: Tensor) -> Tensor:
        return torch.stack([sum_squares(one.sin()) for one in rows]).sum(0)

    check(norms, [torch.randn(3, 4) for _ in range(FEW + 1)], 0)


def test_rows_that_need_norms_stay() -> None:
    """Rows that depend on other norms cannot be summed beside them; their own norms are by themselves."""

    def chain(*rows: Tensor) -> list[Tensor]:
        first = scaled(*rows)
        return [*first, *scaled(*(one.cos() for one in first))]

    gm = check(chain, [torch.randn(3, 4) for _ in range(FEW + 1)], FEW + 1)
    assert calls(gm, SQUARES) == FEW + 1


def test_other_batches_stay() -> None:
    def two(*rows: Tensor) -> list[Tensor]:
        half = len(rows) // 2
        return [*scaled(*rows[:half]), *scaled(*rows[half:])]

    rows = [torch.randn(3, 4) for _ in range(FEW + 1)] + [torch.randn(2, 4) for _ in range(FEW + 1)]
    assert calls(check(two, rows, FEW + 1), SQUARES) == FEW + 1


@pytest.mark.parametrize("written", [False, True])
def test_past_a_write_nothing_moves(written: bool) -> None:
    """Sums that are taken before a write are not taken behind it, together with those of later rows."""

    def late(*rows: Tensor) -> list[Tensor]:
        squares = [sum_squares(one) for one in rows]
        last = rows[-1].sin()
        total = torch.stack([*squares, sum_squares(last)]).sum(0).unsqueeze(1)
        return [one / total for one in (*rows, last)]

    gm = traced(late, *(torch.randn(3, 4) for _ in range(FEW + 1)))
    if written:
        first, second, *_ = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_after(gm.graph.find_nodes(op="call_function", target=SQUARES)[2]):
            gm.graph.call_function(torch.ops.aten.copy_.default, (first, second))
    join_squares(gm)
    assert calls(gm, MANY) == (not written)


# Whole steps


class Deep(nn.Module):
    """Layers with and without biases, one of them used twice."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=i % 2 == 0) for i in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.layers[0](x))


def clipped_by_the_loop(model: nn.Module, x: Tensor, bound: float) -> list[Tensor]:
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for one in x:
        grads = torch.autograd.grad(model(one.unsqueeze(0)).square().sum(), parameters)
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for sum_, grad in zip(total, grads, strict=True):
            sum_ += grad * (bound / norm).clamp(max=1)
    return total


@pytest.mark.inductor
def test_a_deep_network() -> None:
    torch.manual_seed(0)
    original = Deep(6, 20)
    model = fxgrad.transform(original, quantity=fxgrad.ClippedGrad(0.05))

    def step(x: Tensor) -> None:
        model(x).square().sum().backward()

    for n in (6, 1, 4, 0):
        x = torch.randn(n, 6)
        expected = clipped_by_the_loop(Deep.double(original), x.double(), 0.05) if n else None
        original.float()
        _, codes = run_and_get_code(step, x)
        if n == 6:
            assert sum(code.count("fxgrad.squares_of_many.default.direct([") for code in codes) == 1
        for i, parameter in enumerate(original.parameters()):
            wanted = torch.zeros_like(parameter) if expected is None else expected[i].float()
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
        model.zero_grad()
