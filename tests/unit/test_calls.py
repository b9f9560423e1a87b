"""Every spelling of an op is one call: one name, and arguments by the names that ATen's schemas give."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxgrad.ops.calls import Call, bind, map_nodes, op_name
from tests.unit.nodes import call

X, W, B = torch.zeros(3, 4), torch.zeros(4, 4), torch.zeros(4)
IDS, MASK = torch.zeros(3, dtype=torch.long), torch.zeros(3, 4, dtype=torch.bool)
aten = torch.ops.aten


def text(call: Call) -> str:
    """``op(given arguments)``, with ``_`` behind an op in place; arguments at their defaults are left out."""
    given = [f"{name}={value}" for name, value in call.arguments.items() if name in call.given]
    return f"{call.op}{'_' * call.inplace}({', '.join(given)})"


SPELLINGS: dict[str, list[fx.Node]] = {
    "add(input=x, other=y)": [
        call(operator.add, X, W),
        call(torch.add, X, W),
        call("add", X, W),
        call("add", X, other=W),
        call("__add__", X, W),
        call("__radd__", X, W),
        call(aten.add.Tensor, X, W),
    ],
    "add_(input=x, other=y)": [call(operator.iadd, X, W), call("add_", X, W), call(aten.add_.Tensor, X, W)],
    "add(input=x, other=y, alpha=2)": [call(torch.add, X, W, alpha=2), call("add", X, W, alpha=2)],
    "sub(input=1, other=x)": [call(operator.sub, 1, X)],
    "rsub(input=x, other=1)": [call(torch.rsub, X, 1), call("__rsub__", X, 1)],
    "div(input=x, other=2)": [call(operator.truediv, X, 2), call("divide", X, 2), call("true_divide", X, 2)],
    "view(input=x, size=(2, 6))": [call("view", X, 2, 6), call("view", X, (2, 6))],
    "view(input=x, dtype=torch.int32)": [call("view", X, torch.int32)],
    "permute(input=x, dims=(1, 0))": [call("permute", X, 1, 0), call(torch.permute, X, (1, 0))],
    "transpose(input=x, dim0=0, dim1=1)": [call("transpose", X, 0, 1), call("swapaxes", X, 0, 1)],
    "clamp(input=x, min=0.0, max=1.0)": [call("clamp", X, 0.0, 1.0), call(torch.clip, X, 0.0, 1.0)],
    "sum(input=x)": [call("sum", X), call(torch.sum, X), call(torch.sum, input=X)],
    "sum(input=x, dim=1)": [call("sum", X, 1), call("sum", X, dim=1), call(torch.sum, X, axis=1)],
    "sum(input=x, dim=1, keepdim=True)": [call("sum", X, 1, True), call(torch.sum, X, axis=1, keepdims=True)],
    "sum(input=x, dim=(0, 1))": [call("sum", X, (0, 1)), call("sum", X, dim=(0, 1))],
    "max(input=x)": [call("max", X)],
    "max(input=x, dim=1)": [call("max", X, 1)],
    "max(input=x, other=y)": [call(torch.max, X, W)],
    "linear(input=x, weight=y)": [call(F.linear, X, W), call(F.linear, X, W, None), call(F.linear, input=X, weight=W)],
    "linear(input=x, weight=y, bias=z)": [call(F.linear, X, W, B), call(F.linear, X, W, bias=B)],
    "addmm(input=x, mat1=y, mat2=z)": [call(torch.addmm, B, X, W), call(aten.addmm.default, B, X, W)],
    "embedding(input=x, weight=y)": [call(F.embedding, IDS, W)],
    "embedding(weight=x, input=y)": [call(aten.embedding.default, W, IDS)],
    "softmax(input=x, dim=1)": [call(F.softmax, X, 1), call("softmax", X, 1), call(torch.softmax, X, dim=1)],
    "dropout(input=x)": [call(F.dropout, X), call(F.dropout, X, 0.5)],
    "relu_(input=x)": [call(torch.relu_, X), call("relu_", X)],
    "relu_(input=x, inplace=True)": [call(F.relu, X, True), call(F.relu, X, inplace=True)],
    "masked_fill(input=x, mask=y, value=0.0)": [call("masked_fill", X, MASK, 0.0)],
    "cat(tensors=[x, y])": [call(torch.cat, [X, W]), call(torch.concat, [X, W], 0), call(aten.cat.default, [X, W])],
    "einsum(equation=ij,jk->ik, operands=(x, y))": [
        call(torch.einsum, "ij,jk->ik", X, W),
        call(torch.einsum, "ij,jk->ik", [X, W]),
    ],
    "einsum(equation=ab,bc->ac, operands=(x, y))": [call(torch.einsum, X, [0, 1], W, [1, 2], [0, 2])],
    "zeros(size=(2, 3))": [call(torch.zeros, 2, 3), call(torch.zeros, (2, 3))],
    # what no schema describes
    "getitem(input=x, index=0)": [call(operator.getitem, X, 0), call("__getitem__", X, 0)],
    "setitem_(input=x, index=0, value=1.0)": [call(operator.setitem, X, 0, 1.0), call("__setitem__", X, 0, 1.0)],
}


@pytest.mark.parametrize("node, expected", [(node, one) for one, nodes in SPELLINGS.items() for node in nodes])
def test_spellings(node: fx.Node, expected: str) -> None:
    assert text(bind(node)) == expected
    assert not bind(node).guessed


def scaled(x: Any, factor: float = 2.0, *, shift: float = 0.0, **rest: Any) -> Any:
    return x


def test_a_function_of_the_users_own_has_its_own_names() -> None:
    bound = bind(call(scaled, X, shift=1.0, more=3))
    assert text(bound) == f"{__name__}.scaled(x=x, shift=1.0, more=3)"
    assert bound.arguments["factor"] == 2.0


def test_attributes_are_calls() -> None:
    assert bind(call(getattr, X, "T")).op == "T"
    assert bind(call(getattr, X, "data")).op == "detach"


def test_defaults_are_arguments_that_are_not_given() -> None:
    bound = bind(call("sum", X, 1, False))
    assert bound.arguments["keepdim"] is False and bound.given == {"input", "dim"}
    assert bound.get("keepdim") is False and bound.get("nothing", 7) == 7


GUESSED: dict[str, fx.Node] = {
    "rmatmul(input=x, other=y)": call("__rmatmul__", X, W),  # no schema: by its place
    "rpow(input=x, arg1=2)": call("__rpow__", X, 2),
    "type(input=x, arg1=torch.float64)": call("type", X, torch.float64),
    "nosuch(input=x, arg1=1, arg2=y, more=3)": call("nosuch", X, 1, W, more=3),
    "pow(input=x, exponent=text)": call(torch.pow, X, "text"),  # no overload takes it: the first one of so many names
}


@pytest.mark.parametrize("expected", GUESSED)
def test_where_no_schema_fits_names_are_guessed(expected: str) -> None:
    bound = bind(GUESSED[expected])
    assert text(bound) == expected
    assert bound.guessed is not expected.startswith("pow")  # which has the names of an overload


@pytest.mark.parametrize(
    "target, name",
    [
        (operator.iadd, "add_"),
        (operator.matmul, "matmul"),
        (operator.setitem, "setitem_"),
        (torch.concatenate, "cat"),
        (torch.Tensor.clip_, "clamp_"),
        ("arctan2_", "atan2_"),
        (F.unfold, "im2col"),  # torch.nn.functional's own, not the method of a tensor
        ("unfold", "unfold"),
        (F.linear, "linear"),
        (aten.add.Tensor, "add"),
        (aten.linalg_matmul, "matmul"),
        (torch.ops.fxgrad.pack.default, "fxgrad::pack"),
        (torch.ops.higher_order.cond, "higher_order::cond"),
        (scaled, f"{__name__}.scaled"),
    ],
)
def test_names(target: Any, name: str) -> None:
    assert op_name(target) == name


def test_nodes_are_replaced_in_every_container() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    nest = (a, [b, {"key": a}], slice(None, b, 2), "a", None)
    assert map_nodes(nest, lambda node: node.name) == ("a", ["b", {"key": "a"}], slice(None, "b", 2), "a", None)


def test_a_call_in_a_copy_of_its_graph() -> None:
    node = call(torch.cat, [X, W], 1)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(node.graph, copies)
    moved = bind(node).moved(copies)
    assert text(moved) == "cat(tensors=[x, y], dim=1)"
    assert all(one.graph is graph for one in moved.arguments["tensors"])
