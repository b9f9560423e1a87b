"""Operators that tracers do not look into: what they do for those who call them in the wrong place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxgrad
from fxgrad.kernels import operators
from fxgrad.kernels.operators import operator


@operator(lambda x: x.new_empty(x.shape))
def doubled_for_tests(x: Tensor) -> Tensor:
    return x * 2


@operator(lambda x: x.new_empty((), dtype=torch.int64))
def rows_for_tests(x: Tensor) -> Tensor:
    return torch.tensor(len(x))


@operator(lambda x: x.new_empty(x.shape))
def returned_for_tests(x: Tensor) -> Tensor:
    return x.view(x.shape)


def test_no_gradient_is_lost() -> None:
    """PyTorch's own fallback would warn, and leave the gradient out."""
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="doubled_for_tests has no gradient"):
        doubled_for_tests(x)
    with torch.no_grad():
        assert doubled_for_tests(x).sum() == 6
    assert doubled_for_tests(x.detach()).sum() == 6
    assert rows_for_tests(x) == 3


def test_compiled_with_a_gradient() -> None:
    def loss(x: Tensor) -> Tensor:
        return doubled_for_tests(x).sum()

    with pytest.raises(NotImplementedError, match="doubled_for_tests has no gradient"):
        torch.compile(loss, backend="aot_eager")(torch.ones(3, requires_grad=True))


def test_the_suite_looks_at_the_memory_of_results() -> None:
    assert operators.looks_on is not None
    with pytest.raises(AssertionError, match="returns memory of its arguments"):
        returned_for_tests(torch.ones(3))


@pytest.mark.parametrize("compiled", [False, True])
def test_results_are_cleared(compiled: bool) -> None:
    """Also in a function of the user's that Dynamo traces."""
    layer = torch.nn.Linear(3, 2)
    model = fxgrad.transform(layer, backend="eager")
    model(torch.ones(5, 3)).sum().backward()

    def clear() -> None:
        fxgrad.zero_grad(model)

    (torch.compile(clear, backend="eager") if compiled else clear)()
    assert layer.weight.grad_sample is None  # type: ignore[attr-defined]
