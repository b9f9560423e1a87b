"""The parameters of a model by name, in every call: always those that `named_parameters` has."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxgrad.capture.named_parameters import NamedParameters


class Equal(nn.Linear):
    """Modules that all compare equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = nn.Module.__hash__


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 1), nn.ReLU()), Equal(1, 2))
    model.register_parameter("none", None)
    return model


def replace(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(3, 3))


def replace_one_number(model: Any) -> None:
    model[1][0].bias = nn.Parameter(model[1][0].bias.detach().clone())  # equal to the one before


def replace_behind_the_hooks(model: Any) -> None:
    model[1][0]._parameters["weight"] = nn.Parameter(torch.zeros(1, 3))


def replace_an_equal_module(model: Any) -> None:
    model[2] = Equal(1, 2)


def fill_a_place(model: Any) -> None:
    model.none = nn.Parameter(torch.zeros(2))


def rename(model: Any) -> None:
    model[0]._parameters["other"] = model[0]._parameters.pop("bias")


def swap_names(model: Any) -> None:
    own = model[0]._parameters
    own["weight"], own["bias"] = own["bias"], own["weight"]


def remove(model: Any) -> None:
    del model[1][0].bias


def tie(model: Any) -> None:
    model[1].tied = model[0]


def add_inside(model: Any) -> None:
    model[1][1].inner = nn.Linear(2, 2)  # of a module that had nothing


def remove_a_module(model: Any) -> None:
    del model[1]


def new_dictionary(model: Any) -> None:
    model[0]._parameters = {"fresh": nn.Parameter(torch.zeros(1))}


CHANGES = [
    replace, replace_one_number, replace_behind_the_hooks, replace_an_equal_module, fill_a_place, rename, swap_names,
    remove, tie, add_inside, remove_a_module, new_dictionary,
]  # fmt: skip


def check(named: NamedParameters, model: nn.Module) -> None:
    expected, found = dict(model.named_parameters()), named.now()
    assert list(found) == list(expected)
    assert all(found[name] is parameter for name, parameter in expected.items())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen(change: Callable[[nn.Module], None]) -> None:
    model = net()
    named = NamedParameters(model)
    check(named, model)
    before = named.now()
    assert named.now() is before
    change(model)
    check(named, model)
    assert named.now() is not before
    assert named.now() is named.now()


@pytest.mark.parametrize("seed", range(20))
def test_sequences_of_changes(seed: int) -> None:
    model = net()
    named = NamedParameters(model)
    for change in random.Random(seed).sample(CHANGES, len(CHANGES)):
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError):  # an earlier one took its place
            change(model)
        check(named, model)


def test_a_model_that_hides_parameters() -> None:
    class Hidden(nn.Sequential):
        def named_parameters(self, *args: Any, **arguments: Any) -> Any:
            return iter(())

    model = Hidden(nn.Linear(3, 2))
    assert list(NamedParameters(model).now()) == ["0.weight", "0.bias"]


def test_what_it_gives_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        NamedParameters(net()).now()["0.weight"] = None  # type: ignore[index]
