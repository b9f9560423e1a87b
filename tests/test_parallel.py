"""Tensor parallelism in two processes against the loop over single samples, and stages of a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fxgrad
import tests.parallel_refusals  # noqa: F401 - registers cases
from tests.parallel_processes import CASES, LONG
from tests.processes import findings
from tests.sharded_processes import WORLD

pytestmark = pytest.mark.timeout(1500)

QUICK = [name for name in CASES if name not in LONG]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes found: one pair of them for all cases that are not long."""
    return findings("tests.parallel_processes", tmp_path_factory.mktemp("processes"), *QUICK)


@pytest.mark.parametrize("case", QUICK)
def test_parallel(found: list[dict[str, str]], case: str) -> None:
    for rank in range(WORLD):
        assert found[rank].get(case, "not run, as an earlier case failed") == "", found[rank].get(case)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_parallel_for_long(tmp_path: Path, case: str) -> None:
    assert findings("tests.parallel_processes", tmp_path, case) == [{case: ""}] * WORLD


def test_stages_of_a_pipeline_are_groups() -> None:
    """A stage sees its own parameters, and gets its output's gradient from the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x, names = torch.randn(5, 3, dtype=torch.double), [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    bounds = [0.3, 0.2]
    whole = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bounds, groups=names), backend="eager")
    whole(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    fxgrad.zero_grad(whole)
    fxgrad.release(whole)
    first, second = (
        fxgrad.transform(stage, quantity=fxgrad.ClippedGrad(bound), backend="eager")
        for stage, bound in zip(model, bounds, strict=True)
    )
    sent = first(x)
    received = sent.detach().requires_grad_()
    second(received).square().sum().backward()
    sent.backward(received.grad)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=0)
