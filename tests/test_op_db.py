"""PyTorch's operator database beside what tests/ledger/ has: AOTAutograd, functions of parameters, layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from tests.database_models import layout_cases, op_cases, uniform_case
from tests.databases import OF_ONE_TENSOR, OF_SEVERAL, Case, entries, examine, op_db

T = TypeVar("T")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the samples include uses that PyTorch advises against

MOVEMENTS = """
    column_stack flip gather hstack index_select movedim roll slice tile vstack where
""".split()
"""Ops without a rule of their own that move a parameter's elements before it meets the samples."""


def samples(info: Any) -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    for index, sample in enumerate(info.sample_inputs("cpu", torch.float64, requires_grad=True)):
        if not sample.kwargs.get("dropout_p"):
            yield f"{info.full_name}[{index}]", sample


def cases(info: Any, *, few: int) -> list[Case]:
    """One way to batch a tensor for each of `few` samples, another one for each."""
    made = [list(op_cases(info.op, name, sample)) for name, sample in spread(list(samples(info)), few)]
    found = [ways[index % len(ways)] for index, ways in enumerate(made) if ways]
    return [case.with_input_gradients(k % 2 == 0) for k, case in enumerate(found)]


def spread(made: list[T], n: int) -> list[T]:
    """n of them, from all over the list."""
    return made[:: -(-len(made) // n)] if n < len(made) else made


def by_name(info: Any) -> str:
    return str(info.full_name)


@pytest.mark.parametrize("info", entries(OF_SEVERAL), ids=by_name)
def test_op_through_aot_eager(info: Any) -> None:
    """One tensor is the batched input, the others are parameters; through AOTAutograd, one of the samples."""
    alone = [case for case in cases(info, few=2) if case.out_dims is not None]
    report = examine(alone[:1], backend="aot_eager")
    assert not report.wrong, "\n".join(report.wrong)


NARROW = {"float": 1e-6, "half": 1e-2, "bfloat16": 5e-2}
"""Ops that round, with the relative error that this leaves."""


@pytest.mark.parametrize("info", entries(OF_ONE_TENSOR, MOVEMENTS), ids=by_name)
def test_function_of_parameters(info: Any) -> None:
    """x ⊙ op(parameters): the op sees parameters alone and its result meets the samples."""
    made = [uniform_case(info.op, name, sample) for name, sample in spread(list(samples(info)), 3)]
    tolerance = NARROW.get(info.name)
    report = examine(replace(case, tolerance=tolerance) for case in made if case is not None)
    print(f"{info.full_name} of parameters: {report}")
    assert not report.wrong, "\n".join(report.wrong)
    assert not report.refused


UNDEFINED = ("backward", "empty")
"""Parts of names of ops that check no shapes, or whose values are whatever the memory held."""

LAYOUTS = [
    info
    for info in op_db
    if torch.float64 in info.supported_dtypes("cpu") and not any(part in info.name for part in UNDEFINED)
]


def layouts(info: Any, few: int) -> list[Case]:
    """Of `few` cases in which the samples stay alone and `few` in which they meet, each."""
    chosen = spread(list(samples(info)), few)
    made = [case for name, sample in chosen for case in layout_cases(info.op, name, sample)]
    alone = [case for case in made if case.out_dims is not None]
    return spread(alone, few) + spread([case for case in made if case.out_dims is None], few)


OVER_SAMPLES = ("unbind", "split", "chunk")
"""Parts of names of ops that cut the samples apart: Dynamo unrolls them for many samples before they are refused."""

SOME = [info for info in LAYOUTS if not any(part in info.name for part in OVER_SAMPLES)][::12]


@pytest.mark.parametrize("info", SOME, ids=by_name)
def test_layout(info: Any) -> None:
    """op(x) ⊙ w for the other ops of the database: never wrong, and refused where op lets samples meet."""
    report = examine(layouts(info, 2))
    print(f"{info.full_name} of samples: {report}")
    assert not report.wrong, "\n".join(report.wrong)


@pytest.mark.long
@pytest.mark.parametrize("info", LAYOUTS, ids=by_name)
def test_layout_of_every_op(info: Any) -> None:
    """The same for every op of the database and more of its samples."""
    report = examine(layouts(info, 8))
    print(f"{info.full_name} of samples: {report}")
    assert not report.wrong, "\n".join(report.wrong)
