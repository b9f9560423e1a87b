"""A rule of one's own: the README's five lines, what a wrong one gets, what registration refuses."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import RuleError, UnknownOp
from fxgrad.ops.calls import op_name
from fxgrad.ops.families import family_of
from fxgrad.testing import check_rule


def squared_scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w.square()


def _arguments() -> tuple[Tensor, nn.Parameter]:
    return torch.randn(5, 2, 3, dtype=torch.float64), nn.Parameter(torch.randn(3, dtype=torch.float64))


def test_a_rule_of_ones_own_is_used_and_right() -> None:
    calls = []

    @fxgrad.implements_per_sample_grads(squared_scale, of=["w"])
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        calls.append(g.shape)
        return {"w": (g * x * 2 * w).flatten(1, -2).sum(1)}

    assert check_rule(squared_scale, *_arguments()) <= 1e-10
    assert calls


def test_a_rule_wrong_by_a_thousandth_is_rejected() -> None:
    @fxgrad.implements_per_sample_grads(squared_scale, of=["w"])
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": (g * x * 2.002 * w).flatten(1, -2).sum(1)}

    with pytest.raises(RuleError, match="the rule of squared_scale is wrong: grad_sample"):
        check_rule(squared_scale, *_arguments())


def test_a_rule_may_return_terms() -> None:
    @fxgrad.implements_per_sample_grads(squared_scale, of=["w"])
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, fxgrad.Term]:
        return {"w": fxgrad.Term("n...i,n...i->ni", g, x * 2 * w)}

    assert check_rule(squared_scale, *_arguments()) <= 1e-10


def test_an_op_that_is_only_classified_gets_the_generic_rule() -> None:
    fxgrad.register_op(squared_scale)
    assert check_rule(squared_scale, *_arguments()) <= 1e-10


def test_ops_of_programs_run_one_after_the_other_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import torch, fxgrad
def NAME(x, w):
    return x * w.exp()
fxgrad.register_op(NAME)
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return NAME(x, self.w)
model = Scaled()
fxgrad.transform(model, backend="eager")(x).sum().backward()
"""
    for name in ("first", "second"):  # as IPython's %run and sphinx-gallery do
        main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        x = torch.randn(2, 3)
        main.__dict__["x"] = x
        exec(program.replace("NAME", name), main.__dict__)
        torch.testing.assert_close(main.__dict__["model"].w.grad_sample, x * torch.tensor(1.0).exp())


def scaled_by(k: float) -> Callable[[Tensor, Tensor], Tensor]:
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin() * k

    return scaled


class OfFunction(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.rand(3, dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_functions_of_one_name_are_two(backend: str) -> None:
    """The compiled graph of the first looks its program up after the second was compiled."""
    functions = [scaled_by(1.0), scaled_by(5.0)]
    models = [fxgrad.transform(OfFunction(function), backend=backend) for function in functions]
    for function in functions:
        fxgrad.register_op(function)
    x = torch.randn(4, 3, dtype=torch.float64)

    for i in (0, 1, 0):
        w: Any = models[i].w
        fxgrad.zero_grad(models[i])
        models[i](x).sum().backward()
        torch.testing.assert_close(w.grad_sample, (x * w).cos().detach() * x * [1.0, 5.0][i])


def test_what_is_said_of_a_function_is_not_said_of_another_one_of_its_name() -> None:
    said, unsaid = scaled_by(2.0), scaled_by(3.0)
    fxgrad.register_op(said)

    assert family_of(op_name(said)) is fxgrad.Family.ALONE
    assert family_of(op_name(unsaid)) is None


def test_a_custom_op_is_refused_by_name_until_it_is_classified() -> None:
    @torch.library.custom_op("fxgrad_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    double.register_autograd(lambda ctx, g: g * 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = double(x * self.w)
            return result

    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(UnknownOp, match="fxgrad does not know whether fxgrad_tests::double treats samples alone"):
        fxgrad.transform(Model(), backend="eager")(x)
    fxgrad.register_op(double)
    assert fxgrad.testing.assert_per_sample_grads(Model(), x, backend="eager") <= 1e-10


def test_registering_twice_is_refused_unless_meant() -> None:
    def rule(g: Tensor, input: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {}

    with pytest.raises(RuleError, match="linear already has a rule"):
        fxgrad.implements_per_sample_grads(torch.nn.functional.linear)(rule)
    fxgrad.implements_per_sample_grads(torch.nn.functional.linear, override=True)(rule)
