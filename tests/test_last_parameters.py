"""What was checked of a model's parameters holds as long as none has changed: what counts as a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.capture.checks import LastParameters
from fxgrad.errors import BatchSizeError


class Special(nn.Parameter):
    """A class of its own."""


def becomes_no_leaf(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.requires_grad_(False)
    parameter.mul_(torch.ones(1, requires_grad=True))


def changes_class(parameter: nn.Parameter) -> None:
    parameter.__class__ = Special


def sets(data: Callable[[Tensor], Tensor]) -> Callable[[nn.Parameter], None]:
    def change(parameter: nn.Parameter) -> None:
        parameter.data = data(parameter.data)

    return change


CHANGES: dict[str, Callable[[Any], object]] = {
    "dtype": sets(Tensor.double),
    "shape": sets(lambda data: data[:1].clone()),
    "layout in memory": sets(lambda data: data.t().contiguous().t()),
    "frozen": lambda parameter: parameter.requires_grad_(False),
    "no leaf": becomes_no_leaf,
    "class": changes_class,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    model = nn.Linear(3, 2)
    every = dict(model.named_parameters())
    last = LastParameters()
    assert last.of(every) is None
    assert last.are_ordinary(every, every)
    assert last.of(every) is every and last.of(dict(every)) is None
    CHANGES[change](model.weight)
    assert last.of(every) is None


def test_modes_are_a_change() -> None:
    every = dict(nn.Linear(3, 2).named_parameters())
    last = LastParameters()
    assert last.are_ordinary(every, every)
    with torch.autocast("cpu", torch.bfloat16):
        assert last.of(every) is None

    def look(x: Tensor) -> Tensor:
        assert last.of(every) is None
        return x

    assert last.are_ordinary(every, every)
    torch.func.vmap(look)(torch.ones(2))
    assert last.of(every) is None  # forgotten: the state that a forward is given is of a call that saw no change


def test_frozen_parameters_are_left_out_each_time() -> None:
    model = nn.Linear(3, 2)
    every = dict(model.named_parameters())
    model.bias.requires_grad_(False)
    last = LastParameters()
    trainable = {"weight": model.weight}
    assert last.are_ordinary(every, trainable)
    assert last.of(every) is trainable
    model.bias.requires_grad_()
    assert last.of(every) is None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, of an input that is no leaf
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("ordinary", [False, True])
def test_no_answer_is_older_than_a_change(failed: bool, ordinary: bool) -> None:
    """A call after another dtype may raise before it asks anything, or have inputs that are checked in another way."""
    torch.manual_seed(0)
    original = nn.Linear(3, 2)
    model = fxgrad.transform(original, backend="eager")
    model(torch.randn(4, 3)).sum().backward()
    fxgrad.zero_grad(model)
    original.double()
    if failed:
        with pytest.raises(BatchSizeError, match="batch size is not known"):
            model(torch.tensor(1.0, dtype=torch.float64))
    x = torch.randn(4, 3, dtype=torch.float64)
    model(x if ordinary else x.requires_grad_() * 1).square().sum().backward()
    found: Tensor = original.weight.grad_sample  # type: ignore[attr-defined]
    assert found.dtype is torch.float64
    for i in range(4):
        (own,) = torch.autograd.grad(original(x[i].detach()).square().sum(), [original.weight])
        torch.testing.assert_close(found[i], own)


@pytest.mark.parametrize("step", ["freeze", "unfreeze", "assign", "data"])
def test_changes_between_steps(step: str) -> None:
    """A step in the steady state, a change, and a step: its results are the loop's."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if step == "unfreeze":
        original[0].bias.requires_grad_(False)
    model = fxgrad.transform(original, backend="eager")
    x = torch.randn(5, 3, dtype=torch.float64)
    for _ in range(3):
        model(x).square().sum().backward()
        fxgrad.zero_grad(model)
    if step in ("freeze", "unfreeze"):
        original[0].bias.requires_grad_(step == "unfreeze")
    elif step == "assign":
        original[2].weight = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
    else:
        original[2].weight.data = torch.randn(2, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    frozen = original[0].bias
    assert (getattr(frozen, "grad_sample", None) is not None) == frozen.requires_grad
    trainable = {name: p for name, p in original.named_parameters() if p.requires_grad}
    results: dict[str, Tensor] = {name: p.grad_sample for name, p in trainable.items()}  # type: ignore[attr-defined]
    for i in range(5):
        loss = original(x[i : i + 1]).square().sum()
        own = torch.autograd.grad(loss, list(trainable.values()))
        for (name, result), grad in zip(results.items(), own, strict=True):
            torch.testing.assert_close(result[i], grad, msg=name)
