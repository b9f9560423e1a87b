"""Our own definitions of ops: PyTorch's numbers, one graph for every batch size, and in force only while we capture."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DispatchKey

import fxgrad
from fxgrad.capture.definitions import gru_cell, lstm_cell, take_along_dim, traceable_definitions
from fxgrad.testing import assert_per_sample_grads

OP = torch.ops.aten.take_along_dim.default


@pytest.mark.parametrize(
    ("shape", "indices", "dim"),
    [((4, 3), (4, 2), 1), ((4, 3), (1, 3), 0), ((1, 5, 3), (4, 2, 1), -2), ((2, 3), (2, 0), 1), ((2, 3), (5,), None)],
)
def test_numbers(shape: tuple[int, ...], indices: tuple[int, ...], dim: int | None) -> None:
    source = torch.randn(shape)
    places = torch.randint(0, 6 if dim is None else shape[dim], indices)
    assert torch.equal(take_along_dim(source, places, dim), torch.take_along_dim(source, places, dim))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_cells_compute_what_pytorchs_do(kind: str, bias: bool) -> None:
    cell = getattr(nn, kind)(3, 4, bias=bias)
    x, h, c = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)
    ours: Any = lstm_cell if kind == "LSTMCell" else gru_cell
    state: Any = (h, c) if kind == "LSTMCell" else h

    found = ours(x, state, cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)

    for own, native in zip(*map(torch.utils._pytree.tree_leaves, (found, cell(x, state))), strict=True):
        torch.testing.assert_close(own, native, rtol=1e-6, atol=1e-6)


def test_ranks_differ() -> None:
    arguments = torch.randn(4, 3), torch.zeros(4, dtype=torch.long), 0
    with pytest.raises(RuntimeError) as native:
        torch.take_along_dim(*arguments)
    with pytest.raises(RuntimeError) as ours:
        take_along_dim(*arguments)
    assert str(ours.value) == str(native.value)


class Sorted(nn.Module):
    """Each sample's numbers in an order of its own, and a table's by each sample's places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.table = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        own = torch.take_along_dim(self.layer(x), x.argsort(1), 1)
        return own * self.table.take_along_dim(x.argmax(1, keepdim=True), dim=0)


def test_one_graph_for_every_batch_size() -> None:
    model = Sorted().double()
    view = fxgrad.transform(model, backend="eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (5, 6, 9):
            fxgrad.zero_grad(model)
            x = torch.randn(size, 3, dtype=torch.float64)
            view(x).sum().backward()
            for i in range(size):
                alone = copy.deepcopy(model)
                alone(x[i : i + 1]).sum().backward()
                for own, p in zip(model.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(own.grad_sample[i], p.grad)  # type: ignore[attr-defined]


class TiedTable(nn.Module):
    """A table that is also the head: its two gradients are measured as one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh())


def test_one_graph_for_every_batch_size_of_a_tied_table() -> None:
    view = fxgrad.transform(TiedTable().double(), quantity=fxgrad.ClippedGrad(0.5), backend="aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (5, 6, 9):
            view(torch.randint(7, (size, 4))).square().sum().backward()


def test_through_the_checker() -> None:
    assert_per_sample_grads(Sorted(), torch.randn(6, 3))


def test_pytorchs_own_rule_is_back_after_the_call() -> None:
    with traceable_definitions():
        assert OP.py_kernels[DispatchKey.CompositeImplicitAutograd] is take_along_dim
        with traceable_definitions():
            pass
        assert DispatchKey.CompositeImplicitAutograd in OP.py_kernels
    assert DispatchKey.CompositeImplicitAutograd not in OP.py_kernels
