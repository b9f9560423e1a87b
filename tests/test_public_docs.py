"""Each public name's docstring has the sections that a reader looks for, and an example that runs."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fxgrad

TERMS = ("Term", "OneHot")  # what rules are written with
NAMES = [name for name in fxgrad.__all__ if not isinstance(getattr(fxgrad, name), ModuleType)]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(fxgrad, name))]
QUANTITIES = [
    name
    for name in NAMES
    if inspect.isclass(getattr(fxgrad, name)) and issubclass(getattr(fxgrad, name), fxgrad.Quantity)
]
RESULTS = [name for name in NAMES if name not in {*FUNCTIONS, *QUANTITIES, *TERMS}]
OF_MODULES = [fxgrad.losses.token_mean, fxgrad.testing.assert_per_sample_grads, fxgrad.testing.check_rule]


def section(obj: Any, title: str) -> str:
    """The indented lines below ``title:`` in a docstring; empty where there are none."""
    found = re.search(rf"^{title}:\n((?:(?:    .*)?\n)+)", f"{inspect.getdoc(obj)}\n", re.MULTILINE)
    return textwrap.dedent(found[1]).strip() if found else ""


def entries(text: str) -> set[str]:
    """The names that a section describes, one or several with commas before a colon."""
    heads = re.findall(r"^(\w[\w, ]*):", text, re.MULTILINE)
    return {name.strip() for head in heads for name in head.split(",")}


def described(name: str) -> Iterator[str]:
    """The fields of a class of results, by whatever kind of class it is."""
    cls = getattr(fxgrad, name)
    if dataclasses.is_dataclass(cls):
        yield from (field.name for field in dataclasses.fields(cls))
    else:
        yield from getattr(cls, "_fields", ())


@pytest.mark.parametrize(
    "function", [*(getattr(fxgrad, name) for name in FUNCTIONS), *OF_MODULES], ids=lambda f: f.__name__
)
def test_functions(function: Any) -> None:
    signature = inspect.signature(function)
    assert entries(section(function, "Args")) == set(signature.parameters)
    returns = signature.return_annotation not in (None, "None")
    assert bool(section(function, "Returns")) == returns
    raised = entries(section(function, "Raises"))
    assert all(hasattr(fxgrad.errors, name) or name in ("Exception", "AssertionError") for name in raised)


@pytest.mark.parametrize("name", QUANTITIES)
def test_quantities(name: str) -> None:
    quantity = getattr(fxgrad, name)
    assert section(quantity, "Delivers")
    assert entries(section(quantity, "Args")) == {field.name for field in dataclasses.fields(quantity)}
    assert "\nSource: " in (inspect.getdoc(quantity) or "")


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    assert set(described(name)) <= entries(section(getattr(fxgrad, name), "Attributes"))
    assert section(getattr(fxgrad, name), "Attributes")


@pytest.mark.parametrize(
    "obj", [*(getattr(fxgrad, name) for name in NAMES if name not in TERMS), *OF_MODULES], ids=lambda o: o.__name__
)
def test_examples(obj: Any) -> None:
    """The example runs after ``from fxgrad import *``, with torch and nn at hand."""
    names = {**vars(inspect.getmodule(obj) or fxgrad), **vars(fxgrad), "torch": torch, "nn": nn}
    (example,) = doctest.DocTestFinder(recurse=False).find(obj, obj.__name__, globs=names)
    assert example.examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    log: list[str] = []
    runner.run(example, out=log.append)
    assert not runner.failures, "".join(log)
