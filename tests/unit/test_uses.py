"""A use of parameters by one op: its operands in slots, and its call on other values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxgrad.rules.uses import Slot, Use, slots_of
from fxgrad.samples.layouts import Layout

X, W, B = torch.arange(6.0).view(2, 3), torch.ones(4, 3), torch.zeros(4)
LINEAR = Use(
    op="linear",
    target=F.linear,
    method=False,
    args=(Slot(0), Slot(1)),
    kwargs={"bias": Slot(2)},
    arguments={"input": Slot(0), "weight": Slot(1), "bias": Slot(2)},
    layouts=(Layout(0), None, None),
    wrt={1: 0, 2: 1},
    output=Layout(0),
)


def use(target: Any, *args: Any, layouts: tuple[Layout | None, ...] = (Layout(0), None), **changes: Any) -> Use:
    """Another op on the slots in `args`."""
    name = target if isinstance(target, str) else target.__name__
    shared: dict[str, Any] = dict(kwargs={}, arguments={}, layouts=layouts, wrt={1: 0})
    return replace(LINEAR, op=name, target=target, method=isinstance(target, str), args=args, **{**shared, **changes})


def test_slots_are_found_in_every_container() -> None:
    nest = (Slot(2), [Slot(0), {"a": Slot(1)}], slice(None, Slot(3)), 4)
    assert [slot.position for slot in slots_of(nest)] == [2, 0, 1, 3]
    assert str(nest[:2]) == "($2, [$0, {'a': $1}])"


def test_slots_are_filled() -> None:
    assert LINEAR.fill([Slot(1), {"a": (Slot(0), 3)}], ["x", "w"]) == ["w", {"a": ("x", 3)}]


def test_the_arguments_that_hold_parameters() -> None:
    assert LINEAR.differentiated == {"weight": [1], "bias": [2]}
    cat = replace(LINEAR, arguments={"tensors": [Slot(0), Slot(1), Slot(2)], "dim": 0}, wrt={0: 0, 2: 1})
    assert cat.differentiated == {"tensors": [0, 2]}


@pytest.mark.parametrize(
    "one, values, expected",
    [
        (LINEAR, [X, W, B], F.linear(X, W, B)),
        (use("mul", Slot(0), Slot(1)), [X, W[:2]], X),
        (use(torch.mul, Slot(0), 3), [X], 3 * X),
        (use(torch.chunk, Slot(0), 3, 1, select=2), [X], X[:, 2:]),
        (use("amax", Slot(0), kwargs={"dim": 1}), [X], X[:, 2]),
    ],
)
def test_the_call_on_other_values(one: Use, values: list[Tensor], expected: Tensor) -> None:
    assert torch.equal(one.rerun(values), expected)


def test_a_call_in_place_leaves_its_operands_alone() -> None:
    x = X.clone()
    assert torch.equal(use("add_", Slot(0), Slot(1), inplace=True).rerun([x, W[:2]]), X + 1)
    assert torch.equal(x, X)


def test_a_dtype_that_an_op_is_told_is_a_wider_one() -> None:
    one = use("sum", Slot(0), 1, kwargs={"dtype": torch.float32, "keepdim": True})
    assert one.widened().kwargs == {"dtype": torch.float64, "keepdim": True}
    assert use("to", Slot(0), torch.float32).widened().args == (Slot(0), torch.float64)
    assert use("to", Slot(0), torch.int32).widened().args == (Slot(0), torch.int32)


def test_gradients_by_output() -> None:
    g, h = X, 2 * X
    assert use("mul", Slot(0), Slot(1)).by_output([g]) == {0: g}
    assert use("chunk", Slot(0), 2, select=1).by_output([g]) == {1: g}
    assert use("chunk", Slot(0), 3, several=((0, Layout(0)), (2, Layout(0)))).by_output([g, h]) == {0: g, 2: h}


@pytest.mark.parametrize(
    "value, layout, rows",
    [
        (X, Layout(0), [[[0, 1, 2]], [[3, 4, 5]]]),  # [2, 1, 3]: where the samples were, one row stands
        (X.t(), Layout(1), [[[0], [1], [2]], [[3], [4], [5]]]),
        (X.reshape(-1), Layout(0, 1, 3), [[0, 1, 2], [3, 4, 5]]),
        (X.t().reshape(-1), Layout(0, 3, 1), [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_operands_with_the_samples_first(value: Tensor, layout: Layout, rows: list[Any]) -> None:
    first, shared, number = use("mul", layouts=(layout, None, None)).sample_first([value, W, 3], 2)
    assert first.tolist() == rows
    assert shared is W and number == 3


@pytest.mark.parametrize(
    "one, key",
    [
        (LINEAR, "torch._C._nn.linear($0, $1){'bias': $2}[None] batched=[0]"),
        (use("add_", Slot(0), Slot(1), inplace=True), "add_in place($0, $1){}[None] batched=[0]"),
        (use("chunk", Slot(0), 3, select=2, layouts=(None,)), "chunk($0, 3){}[2] batched=[]"),
        (
            use("chunk", Slot(0), 3, several=((0, Layout(0)), (2, Layout(0))), layouts=(Layout(1),)),
            "chunk outputs=[0, 2]($0, 3){}[None] batched=[0]",
        ),
    ],
)
def test_the_computation_in_words(one: Use, key: str) -> None:
    assert one.key() == key
