"""A rule of one's own: the README's five lines, what a wrong one gets, what registration refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import RuleError, UnknownOp
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
    with pytest.raises(UnknownOp, match="nobody has said whether fxgrad_tests::double treats samples alone"):
        fxgrad.transform(Model(), backend="eager")(x)
    fxgrad.register_op(double)
    assert fxgrad.testing.assert_per_sample_grads(Model(), x, backend="eager") <= 1e-10


def test_registering_twice_is_refused_unless_meant() -> None:
    def rule(g: Tensor, input: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {}

    with pytest.raises(RuleError, match="linear already has a rule"):
        fxgrad.implements_per_sample_grads(torch.nn.functional.linear)(rule)
    fxgrad.implements_per_sample_grads(torch.nn.functional.linear, override=True)(rule)
