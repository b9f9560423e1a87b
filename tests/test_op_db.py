"""Every sample of PyTorch's operator database, for each op with a rule: right, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F

from fxgrad.calls import op_name
from fxgrad.rules import RULES, Rule
from tests.database_models import layout_cases, op_cases, uniform_case
from tests.databases import Case, examine, op_db

T = TypeVar("T")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the samples include uses that PyTorch advises against

WITHOUT_RULE = """
    __radd__ __rdiv__ __rmul__ __rsub__ add addbmm addcdiv addcmul addmv addr column_stack div gather hstack
    index_select inner kron lerp masked_fill mul nn.functional.bilinear nn.functional.scaled_dot_product_attention
    outer rsub sub take_along_dim tensordot true_divide vstack where
""".split()
"""Ops of several tensors that reach a rule through their family, a decomposition, or the generic one."""

MOVEMENTS = """
    column_stack flip gather hstack index_select movedim roll slice tile vstack where
""".split()
"""Ops without a rule of their own that move a parameter's elements before it meets the samples."""

UNSEEDED = {"nn.functional.scaled_dot_product_attention": F.scaled_dot_product_attention}
"""Ops around which the database sets a random seed, which no graph can hold; dropout is left out of the samples."""

SLOW = {"nn.functional.bilinear": 2, "nn.functional.conv3d": 3}
"""Ops with fewer samples in the default run than the others."""

ONE_SIZE = "it works for one number of samples only"

REFUSED: dict[str, dict[str, int]] = {
    # the samples' own kernels, or their dot products
    "nn.functional.conv3d": {
        "it gets its samples on another dimension than #": 20,  # 1x1x1 kernels, which treat positions alone
    },
    "inner": {"inner brings a parameter into a value that mixes samples": 1},
    # a query's positions, or a value's features, as samples
    "nn.functional.scaled_dot_product_attention": {"it attends over the sample dimension": 19},
    # implementations in C++ that turn a symbolic size into a number
    "nn.functional.bilinear": {ONE_SIZE: 12},
    "kron": {ONE_SIZE: 4},
    # a parameter read at the samples' own positions
    "take_along_dim": {ONE_SIZE: 3, "its operands hold the samples in different orders": 2},
    # a channel's positions as samples
    "nn.functional.batch_norm": {"it gets its samples on another dimension than #": 3},
}
"""Cases in which a batch exists and that are refused all the same: op -> {reason: how many}. A closed list."""


def entries(*chosen: Collection[str]) -> list[Any]:
    return [
        info
        for info in op_db
        if any(info.name in names for names in chosen) and torch.float64 in info.supported_dtypes("cpu")
    ]


def rule_of(info: Any) -> Rule | None:
    return RULES.get(op_name(info.name.removeprefix("nn.functional.")))


RULED = {info.name: rule for info in op_db if (rule := rule_of(info)) is not None}
OF_ONE_TENSOR = {name for name, rule in RULED.items() if rule.differentiates == {"input"}}
CRASHES = {"nn.functional.embedding_bag"}
"""PyTorch's kernel ends the process on offsets outside of the ids, which the search for a batch tries."""
OF_SEVERAL = RULED.keys() - OF_ONE_TENSOR - CRASHES


def samples(info: Any) -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    for index, sample in enumerate(info.sample_inputs("cpu", torch.float64, requires_grad=True)):
        if not sample.kwargs.get("dropout_p"):
            yield f"{info.full_name}[{index}]", sample


def cases(info: Any, *, few: int = 0) -> list[Case]:
    """Every way to batch a tensor of every sample; or one way for each of `few` samples, another one for each."""
    chosen: list[Case] = []
    op = UNSEEDED.get(info.name, info.op)
    for index, (name, sample) in enumerate(spread(list(samples(info)), few)):
        made = list(op_cases(op, name, sample))
        chosen += [made[index % len(made)]] if few and made else made
    return [case.with_input_gradients(k % 2 == 0) for k, case in enumerate(chosen)]


def spread(made: list[T], n: int) -> list[T]:
    """n of them, from all over the list; all of them for n = 0."""
    return made[:: -(-len(made) // n)] if 0 < n < len(made) else made


def by_name(info: Any) -> str:
    return str(info.full_name)


@pytest.mark.parametrize("info", entries(OF_SEVERAL, WITHOUT_RULE), ids=by_name)
def test_op(info: Any) -> None:
    """One tensor is the batched input, the others are parameters: some samples."""
    report = examine(cases(info, few=SLOW.get(info.name, 4)))
    print(f"{info.full_name}: {report}")
    assert not report.wrong, "\n".join(report.wrong)
    assert report.refused <= Counter(REFUSED.get(info.full_name, {}))


@pytest.mark.long
@pytest.mark.parametrize("wanted", [True, False], ids=["input gradients", "no input gradients"])
@pytest.mark.parametrize("info", entries(OF_SEVERAL, WITHOUT_RULE), ids=by_name)
def test_op_in_every_way(info: Any, wanted: bool) -> None:
    """Each tensor of every sample in turn is batched along each of its dims; no refusal is missing from the list."""
    report = examine(case.with_input_gradients(wanted) for case in cases(info))
    print(f"{info.full_name}: {report}")
    assert not report.wrong, "\n".join(report.wrong)
    assert report.refused == Counter(REFUSED.get(info.full_name, {}))


@pytest.mark.parametrize("info", entries(OF_SEVERAL), ids=by_name)
def test_op_through_aot_eager(info: Any) -> None:
    """The same through AOTAutograd, one of the samples."""
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

SOME = [info for info in LAYOUTS if not any(part in info.name for part in OVER_SAMPLES)][::6]


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
