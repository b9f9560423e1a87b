"""The joint graph that AOTAutograd traces: how much longer a quantity makes it, and what Inductor gets of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import default_partition
from torch.fx.experimental.proxy_tensor import make_fx

import fxgrad
from benchmarks.models import MODELS
from fxgrad.kernels.fusible import FUNCTIONS, opened
from fxgrad.kernels.norms import FEW, bounded, root_of_few, root_of_many, root_sum_squares
from fxgrad.kernels.on_gpu import form_of


def joint_graph(model: nn.Module, x: Tensor, y: Tensor, losses: Any, quantity: fxgrad.Quantity | None) -> fx.Graph:
    """Return what AOTAutograd traces for one step."""
    graphs: list[fx.Graph] = []

    def partition(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs.append(gm.graph)
        return default_partition(gm, *args, **kwargs)

    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    if quantity is None:
        run: Any = torch.compile(model, backend=backend)
    else:
        run = fxgrad.transform(model, quantity=quantity, backend=backend)
    losses(run(x), y).sum().backward()
    (graph,) = graphs
    return graph


@pytest.mark.parametrize(("name", "most"), [("TF-4", 1.6), ("MLP-3", 2.5)])
def test_the_joint_graph_is_hardly_longer(name: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXGRAD_MACHINE", "reference")
    spec = MODELS[name]
    x, y = spec.data(4)
    plain = joint_graph(spec.build(), x, y, spec.losses, None)
    torch._dynamo.reset()
    clipped = joint_graph(spec.build(), x, y, spec.losses, fxgrad.ClippedGrad(1.0))
    assert len(clipped.nodes) <= most * len(plain.nodes)


def test_what_inductor_gets_is_expanded() -> None:
    """Equal numbers, no operator left, and what is joined only to be taken apart is not joined."""

    def total(a: Tensor, b: Tensor, off: Tensor) -> Tensor:
        return root_sum_squares([bounded(a, off), bounded(b, off)], False)[1]

    values = torch.randn(3, 4), torch.randn(3, 5), torch.rand(3, dtype=torch.float64)
    gm = make_fx(total, tracing_mode="fake")(*values)
    assert sum(node.target in FUNCTIONS for node in gm.graph.nodes) == 3
    expected = total(*values)
    gm = opened(gm, form_of)
    targets = {node.target for node in gm.graph.nodes}
    assert not targets & FUNCTIONS.keys() and torch.ops.aten.cat.default not in targets
    torch.testing.assert_close(gm(*values), expected, rtol=0, atol=0)


def test_equal_values_stay_apart() -> None:
    """Two nodes that were copied from one trace describe one fake value; they are two operands all the same."""

    def total(a: Tensor, b: Tensor, off: Tensor) -> Tensor:
        return root_sum_squares([bounded(a, off), bounded(b, off)], False)

    values = torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, dtype=torch.float64)
    gm = opened(make_fx(total, tracing_mode="fake")(*values), form_of)
    torch.testing.assert_close(gm(*values), total(*values), rtol=0, atol=0)


@pytest.mark.parametrize("wide", [False, True])
def test_the_norm_over_many_parameters_is_no_chain(wide: bool) -> None:
    """A chain through all layers is one expression of thousands of lines for Inductor, alike in no two models."""

    def total(*rows: Tensor) -> Tensor:
        off = rows[0].new_zeros(3, dtype=torch.float64)
        return root_sum_squares([bounded(one, off) for one in rows], wide)

    rows = torch.randn(FEW + 1, 3, 4).unbind()
    traced = make_fx(total, tracing_mode="fake")(*rows).graph
    assert sum(node.target is torch.ops.fxgrad.root_of_many.default for node in traced.nodes) == 1
    few = make_fx(total, tracing_mode="fake")(*rows[:-1]).graph
    assert not any(node.target is torch.ops.fxgrad.root_of_many.default for node in few.nodes)
    off = rows[0].new_zeros(3, dtype=torch.float64)
    norms = [bounded(one, off) for one in rows]
    torch.testing.assert_close(root_of_many(norms, wide), root_of_few(norms, wide), rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [1e300, math.inf, math.nan, 0.0])
def test_extreme_norms_of_many_parameters(value: float) -> None:
    norms = [torch.full((2, 3), 1e-300, dtype=torch.float64) for _ in range(FEW + 1)]
    norms[5][:, 1] = value
    torch.testing.assert_close(root_of_many(norms, True), root_of_few(norms, True), rtol=1e-14, atol=0, equal_nan=True)
