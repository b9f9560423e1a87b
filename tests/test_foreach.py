"""Ops on lists of tensors: each is one op for each tensor, with PyTorch's values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.ops.calls import op_name
from tests.quick import long_but

OPS = sorted(name for name in dir(torch) if name.startswith("_foreach_"))
WHOLE = {"_foreach_powsum"}  # no single op is its definition
OVER_ALL = {"_foreach_norm", "_foreach_max", "_foreach_mm"}  # of all elements, or of matrices
COPIES = {"_foreach_copy"}  # without a derivative of PyTorch's

Program = Callable[[Tensor, Tensor], Any]


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer(x).sigmoid(), x)


def outcome(program: Program, by_definition: Program | None = None) -> str:
    """How each sample's gradients compare with the loop's, or with the loop's over what defines the program."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(program).double()
    alone = copy.deepcopy(model)
    alone.program = by_definition or program
    x = torch.rand(5, 3, dtype=torch.float64) * 0.5 + 0.25
    y = fxgrad.transform(model, backend="eager")(x)
    g = torch.randn(y.shape, dtype=torch.float64)
    (y * g).sum().backward()
    for i in range(len(x)):
        alone.zero_grad()
        (alone(x[i : i + 1]) * g[i : i + 1]).sum().backward()
        for own, p in zip(model.parameters(), alone.parameters(), strict=True):
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(own.grad_sample[i], expected)  # type: ignore[attr-defined]
    return "right"


def forms(name: str, h: Tensor, x: Tensor) -> list[tuple[Any, ...]]:
    """Each form of an op's call on lists of two, no tensor of which is in two places."""
    op = name.removeprefix("_foreach_").removesuffix("_")
    count = {"addcmul": 3, "addcdiv": 3, "lerp": 2}.get(op, 1)
    lists: list[Any] = [[h, x], [x + 1, h + 1], [x * 2, h * 0.5]][:count]
    others = [x * 0.9, h * 1.1]
    if op in ("add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max", "lerp"):
        return [(*lists, 0.5), (*lists, [0.5, 2.0]), (*lists, others)]
    if count == 3:
        return [(*lists, 0.3), (*lists, [0.3, 0.7]), tuple(lists)]
    return [(*lists, others)] if op in ("maximum", "minimum") else [tuple(lists)]


def called(name: str, op: Callable[..., Any], form: int) -> Program:
    """The op in this form, in place or not."""

    def program(h: Tensor, x: Tensor) -> Tensor:
        h, x = h * 1, x * 1
        results = op(*forms(name, h, x)[form])
        return h + 2 * x if name.endswith("_") else results[0] + 2 * results[1]

    return program


IN_PLACE = ("_foreach_add_", "_foreach_lerp_", "_foreach_addcdiv_", "_foreach_exp_", "_foreach_maximum_")
"""One of each kind of call: the others in place take the same way from one to the other."""


def is_quick(name: str) -> bool:
    return name in IN_PLACE or not name.endswith("_")


SINGLE = [name for name in OPS if name.removesuffix("_") not in {*WHOLE, *OVER_ALL, *COPIES}]


@pytest.mark.parametrize("name", long_but(is_quick, SINGLE))
def test_gradients(name: str) -> None:
    op = getattr(torch, name)
    for form in range(len(forms(name, torch.ones(1, 3), torch.ones(1, 3)))):
        if name in ("_foreach_maximum_", "_foreach_minimum_"):
            with pytest.raises(fxgrad.errors.UnknownOp, match=r"fxgrad does not know whether _foreach_m..imum"):
                outcome(called(name, op, form))
        elif name.startswith("_foreach_addcdiv"):  # PyTorch's own derivative fails on one row
            assert outcome(called(name, op, form), called(name, _addcdiv(name), form)) == "right"
        else:
            assert outcome(called(name, op, form)) == "right"


def _addcdiv(name: str) -> Callable[..., Any]:
    def op(inputs: Any, upper: Any, lower: Any, value: Any = 1) -> list[Tensor]:
        values = value if isinstance(value, list) else [value] * len(inputs)
        single = torch.Tensor.addcdiv_ if name.endswith("_") else torch.Tensor.addcdiv
        return [single(*three, value=v) for *three, v in zip(inputs, upper, lower, values, strict=True)]

    return op


def by_name(h: Tensor, x: Tensor) -> Tensor:
    sums = torch._foreach_add([h, x], alpha=3.0, other=[x, h])
    (product,) = torch._foreach_addcmul([sums[0]], [h], [x], value=0.5)
    return product + sums[1]


def by_a_tensor(h: Tensor, x: Tensor) -> Tensor:
    return torch._foreach_mul([h, x], torch.tensor(3.0, dtype=h.dtype))[0]


def of_a_number(h: Tensor, x: Tensor) -> Tensor:
    return torch._foreach_pow(2.0, [h])[0]


def of_columns(h: Tensor, x: Tensor) -> Tensor:
    return torch.stack(torch._foreach_tanh(list(h.unbind(1))), 1)


def without_gradients(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scaled = torch._foreach_mul([x], [h])
    return h * scaled[0]


@pytest.mark.parametrize("program", [by_name, by_a_tensor, of_a_number, of_columns, without_gradients])
def test_programs(program: Program) -> None:
    assert outcome(program) == "right"


def copied_into(h: Tensor, x: Tensor) -> Tensor:
    z = torch.empty_like(x)
    torch._foreach_copy_([z], [h.detach()])
    return h * z


def test_copies_without_gradients() -> None:
    assert outcome(copied_into) == "right"


@pytest.mark.parametrize(
    "program",
    [
        lambda h, x: torch._foreach_add([h], [h.flip(0)])[0],
        lambda h, x: h * torch._foreach_norm([x])[0],
        lambda h, x: torch._foreach_add([h], [torch._foreach_mul([x], 2.0)[0].mean(0)])[0],
    ],
)
def test_samples_that_meet(program: Program) -> None:
    with pytest.raises(fxgrad.errors.MixedSamples, match="lets samples influence each other"):
        outcome(program)


def parameters_in_a_list(model: Any, x: Tensor) -> Tensor:
    weight, bias = torch._foreach_mul([model.layer.weight, model.layer.bias], [2.0, 3.0])
    return torch.nn.functional.linear(x, weight, bias)


def test_functions_of_parameters() -> None:
    class OfParameters(Model):
        def forward(self, x: Tensor) -> Tensor:
            return parameters_in_a_list(self, x)

    fxgrad.testing.assert_per_sample_grads(OfParameters(lambda h, x: h), torch.randn(5, 3))


def test_every_op_is_split_or_named() -> None:
    from fxgrad.passes.split_foreach import _ALIKE

    known = {f"_foreach_{name}" for name in _ALIKE}
    assert {name.removesuffix("_") for name in OPS} - known <= WHOLE
    assert op_name(torch._foreach_mul_) == "_foreach_mul_"
