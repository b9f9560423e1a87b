"""Writes by unusual names into functions of parameters that have a second name: as the loop says, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import MixedSamples, UnsupportedOp
from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED

aten = torch.ops.aten
Program = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer, self.program = nn.Linear(3, 3), program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer, x)


def written(write: Callable[[Tensor], Any], second: Callable[[Tensor], Tensor] = torch.t) -> Program:
    """A doubled weight, a second name for it, and a write: both names are read."""

    def program(m: Any, x: Tensor) -> Tensor:
        u = m.weight * 2
        n = second(u)
        write(u)
        return x @ n + 2 * x @ u

    return program


def by_sort(m: Any, x: Tensor) -> Tensor:
    v, places = m.weight.detach()[:, :1].clone(), torch.zeros(3, 1, dtype=torch.long)
    aten.max.dim_max(m.weight.detach(), 1, True, max=v, max_values=places)
    return x @ (m.weight * v)


def raised_in_place(m: Any, x: Tensor) -> Tensor:
    u = m.weight.abs() + 2
    u **= m.bias.abs()
    return x @ u


RIGHT: dict[str, Program] = {
    "idiv": written(lambda u: u.__idiv__(3.0)),
    "itruediv of the class": written(lambda u: torch.Tensor.__itruediv__(u, 3.0)),
    "a row by itruediv": written(lambda u: torch.Tensor.__itruediv__(u[0], 3.0)),
    "ixor of the class": lambda m, x: m(x) * torch.Tensor.__ixor__((x > 0).long(), 3),
    "lift": written(lambda u: u.mul_(3.0), aten.lift),
    "the result of lift": lambda m, x: written(lambda u: aten.lift(u).mul_(3.0))(m, x),
    "native_dropout that is off": written(lambda u: u.mul_(3.0), lambda u: torch.native_dropout(u, 0.5, False)[0]),
    "what it returned": written(lambda u: torch.native_dropout(u, 0.5, False)[0].mul_(3.0)),
    "rows of one foreach": written(lambda u: torch._foreach_mul_([u[0], u[1]], 3.0)),
    "rows of one foreach, twice": written(lambda u: (torch._foreach_mul_([u[0], u[1]], 3.0), u[1].add_(1.0))),
    "rows and columns": written(lambda u: (u[0].mul_(3.0), u[:, 1].mul_(2.0), u[0].add_(1.0))),
    "an out argument by another name": by_sort,
    "raised in place": raised_in_place,
}


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("name", RIGHT)
def test_against_the_loop(name: str, backend: str) -> None:
    torch.manual_seed(0)
    assert_per_sample_grads(Model(RIGHT[name]).double(), torch.randn(5, 3, dtype=torch.float64), backend=backend)


def test_a_write_that_nobody_declared() -> None:
    """Inside of a transform: the values say it, run on fake tensors."""
    model = Model(lambda m, x: torch.func.vmap(lambda row: row.mul_(3))(m(x)))
    with pytest.raises(UnsupportedOp, match="writes into a tensor in a way that fxgrad does not know"):
        fxgrad.transform(model)(torch.randn(5, 3))


def test_an_evaluated_norm_writes_nothing() -> None:
    buffers = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    model = Model(lambda m, x: F.batch_norm(m(x), *buffers, training=False)).double()
    assert_per_sample_grads(model, torch.randn(5, 3, dtype=torch.float64))


def test_running_statistics_are_written() -> None:
    """No schema of PyTorch says so; the proof of independence follows what reads them."""
    model = nn.Sequential(nn.Linear(6, 6), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)).double()
    assert_per_sample_grads(model, torch.randn(5, 4, 6, dtype=torch.float64))
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    reads = fxgrad.transform(Model(lambda m, x: F.instance_norm(m(x), mean, var) * mean[:, None]).double())
    with pytest.raises(MixedSamples, match="mul lets samples influence each other"):
        reads(torch.randn(5, 4, 3, dtype=torch.float64))


def test_tensors_of_inference_mode() -> None:
    """They count no writes: PyTorch refuses to write into them where gradients are computed."""

    def program(m: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            t = torch.ones(4, dtype=x.dtype)
            halves = t.view(2, 2)
            t.add_(1.0)
        return m(x) * halves.sum()

    assert_per_sample_grads(Model(program).double(), torch.randn(5, 3, dtype=torch.float64))
