"""Operators that tracers do not look into: what they do for those who call them in the wrong place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.inductor
def test_inductor_s_code_goes_past_the_dispatcher() -> None:
    """But where a profiler wants to know what is called, or a mode wants to see it."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    private, x = fxgrad.transform(model, fxgrad.ClippedGrad(1.0)), torch.randn(8, 16, 64)
    step = fxgrad.forward_backward(private, lambda model, x: model(x).square().sum())
    expected, codes = run_and_get_code(step, x)
    calls = re.findall(r"torch\.ops\.fxgrad\.\w+\.default[.\w]*\(", "\n".join(codes))
    assert calls and all(call.endswith(".direct(") for call in calls)
    with torch.profiler.profile() as profile:
        assert step(x) == expected
    assert any(event.name.startswith("fxgrad::") for event in profile.events())
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    doubled: Any = torch.ops.fxgrad.doubled_for_tests.default.direct  # type: ignore[attr-defined]
    assert doubled(x).equal(2 * x) and not seen
    with Mode():
        assert doubled(x).equal(2 * x)
    assert "fxgrad.doubled_for_tests.default" in seen


def test_past_the_dispatcher_a_negated_view_is_what_it_is() -> None:
    """Its memory holds the negative, which the dispatcher would have written out."""
    g, x = torch.randn(4, 16, 6), torch.randn(4, 16, 8, dtype=torch.cfloat).conj().imag
    direct: Any = torch.ops.fxgrad.product_rows.default.direct  # type: ignore[attr-defined]
    assert x.is_neg()
    for found, expected in zip(direct(g, x), direct(g, x.clone()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


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
