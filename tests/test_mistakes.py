"""What users get wrong, and what fxgrad says: each row is a program, its error, and parts of the message.

A message says what is wrong, where, and what to do. A row of PyTorch's or Python's own error stands here if fxgrad
could hide it, or could print something else before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import FxgradError, OptionError, UnknownArgument


class Mistake(NamedTuple):
    program: Callable[[], Any]
    error: type[Exception]
    parts: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}


def mistake(error: type[Exception], *parts: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a program to the table; its name is the row's."""

    def add(program: Callable[[], Any]) -> Callable[[], Any]:
        name = program.__name__.replace("_", " ").strip()
        assert name not in MISTAKES
        MISTAKES[name] = Mistake(program, error, parts)
        return program

    return add


class Net(nn.Module):
    """An encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.enc(x)


def transformed(model: nn.Module | None = None, **options: Any) -> Any:
    return fxgrad.transform(Net() if model is None else model, **{"backend": "eager", **options})


X = torch.linspace(-1, 1, 24).view(8, 3)
SILENT: Any = fxgrad


# Names


@mistake(UnknownArgument, "transform got an unexpected argument 'quanity'", "Did you mean 'quantity'?")
def misspelt_argument() -> Any:
    SILENT.transform(Net(), quanity=fxgrad.NormSample())


@mistake(UnknownArgument, "unexpected argument 'lr'", "It takes model, quantity, loss_reduction,")
def argument_of_another_library() -> Any:
    SILENT.transform(Net(), lr=0.1)


@mistake(UnknownArgument, "ClippedGrad got an unexpected argument 'max_norm'", "Did you mean 'max_grad_norm'?")
def argument_by_the_name_of_clip_grad_norm() -> Any:
    SILENT.ClippedGrad(max_norm=1.0)


@mistake(UnknownArgument, "NormSample got an unexpected argument 'groupsize'", "Did you mean 'group_size'?")
def misspelt_argument_of_a_quantity() -> Any:
    SILENT.NormSample(groupsize=2)


@mistake(UnknownArgument, "call_for_per_sample_grads got an unexpected", "Did you mean 'batch_size'?")
def misspelt_argument_of_the_expanded_weights() -> Any:
    SILENT.call_for_per_sample_grads(Net(), batchsize=8)


@mistake(OptionError, "backend has to be 'inductor', 'aot_eager', 'eager'", "Did you mean 'inductor'?")
def misspelt_backend() -> Any:
    transformed(backend="inductr")


@mistake(OptionError, "backend has to be", "not 'fxgrad'", "It is the compiler behind fxgrad")
def fxgrad_as_its_own_backend() -> Any:
    transformed(backend="fxgrad")


@mistake(OptionError, "loss_reduction has to be 'sum', 'mean' or a positive number", "Did you mean 'mean'?")
def misspelt_reduction() -> Any:
    transformed(loss_reduction="men")


@mistake(OptionError, "loss_reduction has to be", "not 'none'", "is summed before backward()")
def loss_without_a_reduction() -> Any:
    transformed(loss_reduction="none")


@mistake(OptionError, "accumulate has to be one of error, append, sum, overwrite", "Did you mean 'append'?")
def misspelt_policy() -> Any:
    transformed(accumulate="apend")


@mistake(OptionError, "mixing has to be 'error' or 'allow'", "Did you mean 'allow'?")
def misspelt_mixing() -> Any:
    transformed(mixing="alow")


@mistake(OptionError, "strategy has to be a way", "not 'grams'", "Did you mean 'gram'?")
def misspelt_strategy() -> Any:
    transformed(quantity=fxgrad.NormSample(), strategy="grams")


@mistake(OptionError, "strategy names 'enc.wieght'", "no such parameter", "Did you mean 'enc.weight'?")
def strategy_for_a_misspelt_parameter() -> Any:
    transformed(quantity=fxgrad.NormSample(), strategy={"enc.wieght": "gram"})


@mistake(OptionError, "methods names 'encod'", "no method of Net", "Did you mean 'encode'?")
def misspelt_method() -> Any:
    transformed(methods=("encod",))


@mistake(OptionError, "once: head.bias", "'head.bais' is no trainable parameter: did you mean 'head.bias'?")
def misspelt_parameter_in_groups() -> Any:
    groups = [["enc.weight", "enc.bias"], ["head.weight", "head.bais"]]
    transformed(quantity=fxgrad.ClippedGrad(1.0, groups=groups))(X)


@mistake(OptionError, "weights has to be 'clip', 'automatic' or a function", "Did you mean 'automatic'?")
def misspelt_weights() -> Any:
    SILENT.ClippedGrad(1.0, weights="automtic")


@mistake(OptionError, "groups has to be 'flat', 'per_parameter'", "A group of each layer is a list of names")
def groups_by_the_name_that_opacus_has() -> Any:
    SILENT.ClippedGrad(1.0, groups="layerwise")


@mistake(OptionError, "nonfinite has to be 'zero' or 'raise', not 'error'", "'raise' is an error in the backward")
def nonfinite_error() -> Any:
    SILENT.ClippedGrad(1.0, nonfinite="error")


@mistake(OptionError, "modes holds 'train' and 'eval', not 'trian'", "Did you mean 'train'?")
def misspelt_mode() -> Any:
    fxgrad.warm_up(transformed(), X, modes=["trian"])


# What is not a model, or not a quantity


@mistake(OptionError, "transform takes an nn.Module, not the class Net", "Pass an object, Net(..).")
def class_of_a_model() -> Any:
    SILENT.transform(Net)


@mistake(OptionError, "transform takes an nn.Module, not function", "the forward of a module")
def function_as_a_model() -> Any:
    SILENT.transform(torch.nn.functional.relu)


@mistake(OptionError, "transform takes an nn.Module, not list", "nn.Sequential")
def list_of_models() -> Any:
    SILENT.transform([nn.Linear(3, 2)])


@mistake(OptionError, "transform takes an nn.Module, not generator", "Pass the model itself.")
def parameters_as_a_model() -> Any:
    SILENT.transform(Net().parameters())


@mistake(OptionError, "not <class", "Pass an object, not the class: ClippedGrad(max_grad_norm=1.0).")
def class_of_a_quantity() -> Any:
    transformed(quantity=fxgrad.ClippedGrad)


@mistake(OptionError, "not 'NormSamples'", "Did you mean 'NormSample'?")
def quantity_by_its_name() -> Any:
    transformed(quantity="NormSamples")


@mistake(OptionError, "not 1.0", "The quantities are ClippedGrad, Grad, GradDot,")
def number_as_a_quantity() -> Any:
    SILENT.transform(Net(), 1.0)


@mistake(OptionError, "max_grad_norm has to be a positive number, not '1.0'", "the largest norm of a sample's gradient")
def bound_from_a_file_of_settings() -> Any:
    SILENT.ClippedGrad("1.0")


# The table itself


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The message has its parts, and stands alone: nothing else is printed or logged."""
    program, error, parts = MISTAKES[name]
    with pytest.raises(error, match=re.escape(parts[0])) as caught:
        program()
    said = str(caught.value)
    for part in parts:
        assert part in said
    printed = capfd.readouterr()
    assert printed.err + printed.out == ""
    if isinstance(caught.value, FxgradError):
        assert caught.value.advice
    assert len(said.splitlines()) <= 6


def test_a_quantity_may_stand_behind_the_model() -> None:
    norms = fxgrad.NormSample()
    model = fxgrad.transform(Net(), norms, backend="eager")
    model(X).sum().backward()
    assert fxgrad.result(model, norms).shape == (8,)


def test_there_are_many_mistakes() -> None:
    assert len(MISTAKES) >= 25
