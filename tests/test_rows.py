"""What is written once for a row: marks in traced graphs, the code that Inductor writes, and the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxgrad
from fxgrad.compile.rows import write_rows
from fxgrad.host import inductor

MARK = "inductor_realize_to_strides"


def marked(function: Callable[..., Any], *inputs: Tensor) -> list[list[int]]:
    """Return the shapes of what is marked."""
    mode = FakeTensorMode()
    gm = make_fx(function, decomposition_table=inductor.decompositions())(*(mode.from_tensor(one) for one in inputs))
    write_rows(gm)
    return [list(node.meta["val"].shape) for node in gm.graph.nodes if node.meta.get(MARK)]


X = torch.randn(4, 5, 64)

CASES: dict[str, tuple[Callable[[Tensor], Any], list[list[int]]]] = {
    "layer norm": (lambda x: F.layer_norm(x, (64,)), [[4, 5, 1]]),
    "root mean square": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), [[4, 5, 1]]),
    "a row's length, clamped": (lambda x: F.normalize(x, dim=-1), [[4, 5, 1]]),
    "read through views": (lambda x: x * x.sum(-1).sqrt().view(4, 5, 1).expand(4, 5, 64), [[4, 5]]),
    "an exponent": (lambda x: x * x.abs().sum(-1, keepdim=True) ** 0.3, [[4, 5, 1]]),
    "a square is as quick as a number": (lambda x: x * x.sum(-1, keepdim=True) ** 2, []),
    "short rows": (lambda x: x[..., :7] * x[..., :7].sum(-1, keepdim=True).sqrt(), []),
    "one number for all": (lambda x: x * x.sum().sqrt(), []),
    "as many numbers": (lambda x: x * x.abs().sqrt(), []),
    "the row is summed again": (lambda x: x.sum(-1, keepdim=True).exp().sum(), []),
}


@pytest.mark.parametrize(("function", "shapes"), CASES.values(), ids=CASES)
def test_marks(function: Callable[[Tensor], Any], shapes: list[list[int]]) -> None:
    assert marked(function, X) == shapes


def test_the_samples_number_asks_for_no_guard() -> None:
    shapes: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        write_rows(gm)
        shapes.extend(node.name for node in gm.graph.nodes if node.meta.get(MARK))
        return gm

    step: Any = aot_autograd(fw_compiler=backend)
    compiled = torch.compile(lambda x: x.sum(0, keepdim=True).sqrt() * x, backend=step, dynamic=True, fullgraph=True)
    for size in (4, 9):
        compiled(torch.rand(size, 6))
    assert shapes == ["sqrt"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return self.last(F.normalize(h, dim=-1))


@pytest.mark.inductor
def test_one_graph_takes_no_root_for_each_number() -> None:
    model, x = Normed(), torch.randn(6, 10, 24)
    private = fxgrad.transform(model, fxgrad.ClippedGrad(1e9))
    step = fxgrad.forward_backward(private, lambda m, x: m(x).square().sum())
    _, (code,) = run_and_get_code(step, x)
    assert not re.findall(r"std::(sqrt|pow)", code)  # of a row's one number; vectors have their own
    found = [p.grad for p in model.parameters()]
    fxgrad.release(private)
    model.zero_grad()
    model(x).square().sum().backward()
    for p, grad in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-4)
