"""Every rule against the loop over single samples, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxgrad.rules import RULES
from fxgrad.terms import Term
from fxgrad.testing import assert_per_sample_grads
from tests.cases import CONVOLUTIONS, EINSUMS, ELEMENTWISE, LOOKUPS, NORMS, PRODUCTS, Case
from tests.cases_of_parameters import FUNCTIONS, HANDED_OUT, MOVED
from tests.programs import quick_dynamo
from tests.quick import long_but

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

CASES = PRODUCTS + EINSUMS + CONVOLUTIONS + LOOKUPS + NORMS + ELEMENTWISE + MOVED + FUNCTIONS + HANDED_OUT
FIRST = list({case.op: case for case in reversed(CASES)}.values())[::-1]
"""One case for every op."""


def by_name(value: Any) -> str:
    return value.name if isinstance(value, Case) else "x".join(map(str, value)) or "no"


every_case = pytest.mark.parametrize("case", CASES, ids=by_name)
one_per_op = pytest.mark.parametrize("case", FIRST, ids=by_name)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


def check(case: Case, model: nn.Module, inputs: Sequence[Tensor], **how: Any) -> None:
    assert_per_sample_grads(model, *inputs, **{"backend": "eager", "tolerance": case.tolerance, **how})


@pytest.mark.parametrize(
    ("case", "extra"),
    long_but(lambda case, _: case in FIRST, [(case, extra) for case in CASES for extra in case.extra[:-1]]),
    ids=by_name,
)
def test_extra_dims(case: Case, extra: tuple[int, ...], device: torch.device) -> None:
    """All but the most dims that a case can have, which test_aot_eager and test_each_parameter_frozen take."""
    check(case, case.model(device), case.inputs(device, extra))


@every_case
def test_each_parameter_frozen(case: Case, device: torch.device) -> None:
    """Every parameter in turn (of an op's second cases the last), where others train; inputs that require no grad."""
    model = case.model(device)
    parameters = list(model.parameters())
    frozen_in_turn = parameters if case in FIRST else parameters[-1:]
    for frozen in frozen_in_turn if len(parameters) > 1 else [None]:
        for parameter in parameters:
            parameter.requires_grad_(parameter is not frozen)
        check(case, model, case.inputs(device, case.extra[-1], requires_grad=False))


@pytest.mark.parametrize("case", long_but(lambda case: case in FIRST, CASES), ids=by_name)
def test_aot_eager(case: Case, device: torch.device) -> None:
    check(case, case.model(device), case.inputs(device, case.extra[-1]), backend="aot_eager")


class Merged(nn.Module):
    """The samples' rows (b, t), or (t, b), in one dim of the inputs and of the output."""

    def __init__(self, inner: nn.Module, time_first: bool) -> None:
        super().__init__()
        self.inner, self.time_first = inner, time_first

    def forward(self, *inputs: Tensor) -> Any:
        b, t = inputs[0].shape[:2]
        if not self.time_first:
            out = self.inner(*(value.flatten(0, 1) for value in inputs))
            return out.unflatten(0, (b, t))
        out = self.inner(*(value.transpose(0, 1).flatten(0, 1) for value in inputs))
        return out.unflatten(0, (t, b)).transpose(0, 1)


@one_per_op
@pytest.mark.parametrize(
    "time_first", [pytest.param(False, marks=pytest.mark.long), True], ids=["batch_first", "time_first"]
)
def test_merged_rows(case: Case, time_first: bool, device: torch.device) -> None:
    wide = replace(case, arguments=tuple(replace(a, shape=(3, *a.shape)) for a in case.arguments))
    check(case, Merged(case.model(device), time_first), wide.inputs(device))


@pytest.mark.parametrize("case", [case for case in FIRST if case.leading], ids=by_name)
def test_batch_on_dim_1(case: Case, device: torch.device) -> None:
    inputs = [value.detach().transpose(0, 1) for value in case.inputs(device, (3,))]
    for value in inputs:
        value.requires_grad_(value.is_floating_point())
    check(case, case.model(device), inputs, batch_first=False)


def test_every_rule_has_a_case() -> None:
    assert set(RULES) <= {case.op for case in CASES}


def scaled(function: Any, argument: str, factor: float) -> Any:
    """The rule with its answer for one argument wrong by a factor."""

    def wrong(part: Any) -> Any:
        dense = part.dense() if isinstance(part, Term) else part
        return None if dense is None else dense * factor

    def altered(g: Tensor, **arguments: Any) -> Mapping[str, Any]:
        found = dict(function(g, **arguments))
        if argument in found:
            grad = found[argument]
            found[argument] = [wrong(part) for part in grad] if isinstance(grad, list) else wrong(grad)
        return found

    return altered


RULE_ARGUMENTS = [(op, argument) for op, rule in RULES.items() for argument in sorted(rule.differentiates)]


@pytest.mark.parametrize(("op", "argument"), RULE_ARGUMENTS)
def test_rejects_a_rule_off_by_a_thousandth(
    op: str, argument: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """So the cases reach every argument of every rule, and the checker sees a small mistake there."""
    rule = RULES[op]
    for case in (case for case in CASES if case.op == op):
        factor = 1 + max(1e-3, 4 * (case.tolerance or 0))  # in half precision, as much as can be seen
        monkeypatch.setitem(RULES, op, replace(rule, function=scaled(rule.function, argument, factor)))
        try:
            check(case, case.model(device), case.inputs(device))
        except AssertionError as error:
            assert "grad_sample" in str(error)
            return
    pytest.fail(f"no case of {op} noticed")
