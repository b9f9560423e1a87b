"""Nodes that compute the same are one in a graph of a whole step, unless something may be random or have a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxgrad
from fxgrad.compile.merged import merge_equal
from fxgrad.host import inductor

aten = torch.ops.aten


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("fxgrad_tests_merged", "DEF") as made:
        yield made


def _merged(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    gm = make_fx(function)(*args)
    merge_equal(gm)
    torch.testing.assert_close(gm(*args), function(*args))
    return gm


def _count(gm: fx.GraphModule, op: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=op))


def test_equal_nodes_are_one() -> None:
    gm = _merged(lambda x: x.exp().sum(0) + x.exp().sum(1), torch.randn(3, 3))
    assert (_count(gm, aten.exp.default), _count(gm, aten.sum.dim_IntList)) == (1, 2)


def test_what_is_returned_stays_apart() -> None:
    one, two = _merged(lambda x: (x.exp(), x.exp()), torch.randn(3))(torch.randn(3))
    assert one.data_ptr() != two.data_ptr()


def test_random_numbers_are_drawn_twice() -> None:
    def drawn(x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        return zeros.uniform_() - torch.zeros_like(x).uniform_()

    gm = make_fx(torch.func.functionalize(drawn))(torch.randn(100))
    merge_equal(gm)
    assert gm(torch.randn(100)).ne(0).any()


def test_a_users_op_is_called_as_often_as_before(library: torch.library.Library) -> None:
    """It may count its calls."""
    calls = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    library.define("count(Tensor x) -> Tensor")
    library.impl("count", count, "CompositeExplicitAutograd")
    op = torch.ops.fxgrad_tests_merged.count.default
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.sub.Tensor, (graph.call_function(op, (x,)), graph.call_function(op, (x,)))))
    gm = fx.GraphModule(nn.Module(), graph)
    merge_equal(gm)
    assert gm(torch.zeros(1)).tolist() == [-1]


def test_a_group_norms_statistics_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule computes again what the forward has computed inside of the op."""
    seen: list[fx.GraphModule] = []

    def compile_traced(gm: fx.GraphModule, *_: Any, **__: Any) -> Any:
        seen.append(gm)
        raise RuntimeError("seen enough")

    monkeypatch.setattr(inductor, "compile_traced", compile_traced)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    private = fxgrad.transform(model, fxgrad.ClippedGrad(1.0))
    step = fxgrad.forward_backward(
        private, lambda model, x, y: nn.functional.cross_entropy(model(x), y, reduction="sum")
    )
    with pytest.raises(Exception, match="seen enough"):
        step(torch.randn(5, 3, 6, 6), torch.randint(4, (5,)))
    (gm,) = seen
    statistics = aten.var_mean.correction, aten.native_group_norm.default
    assert sum(_count(gm, op) for op in statistics) == 1
