"""Every module with parameters of PyTorch's module database, except the recurrent ones: right, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from tests.database_models import module_case
from tests.databases import Case, examine, module_db

pytestmark = [  # what the modules themselves warn of
    pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

RECURRENT = re.compile(r"nn\.(RNN|LSTM|GRU)(Cell)?$")

REFUSED = {
    # with options= the loss works on chunks: Dynamo stops, B is turned into a number, or one op holds all chunks
    "nn.LinearCrossEntropyLoss": {
        "Attempted to call function marked as skipped",
        "it works for one number of samples only",
        "nobody has said whether torch_nn::_linear_cross_entropy_batch_chunked treats sam",
        "nobody has said whether torch_nn::_linear_cross_entropy_batch_chunked_no_reducti",
    },
    # where nobody says whether tgt_mask is causal, its values decide what runs
    "nn.Transformer": {"Could not guard on data-dependent expression Eq"},
}
"""Why inputs in which a batch exists are refused all the same: module -> reasons. A closed list."""

MANY = {
    "nn.LinearCrossEntropyLoss": 61,
    "nn.MultiheadAttention": 25,
    "nn.Transformer": 13,
    "nn.TransformerDecoderLayer": 13,
    "nn.TransformerEncoder": 13,
    "nn.TransformerEncoderLayer": 13,
}
"""Modules with up to 857 inputs each, products of all their options: one in so many, unless the run is a long one.

The numbers are odd, so that options that come in pairs are both seen.
"""


def module_cases(info: Any, *, one_in: int = 1) -> Iterator[Case]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
        for index, sample in islice(enumerate(inputs), 0, None, one_in):
            torch.manual_seed(index)
            model = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            model = model.double().train(training)
            if any(True for _ in model.parameters()):
                name = f"{info.name}[{index}] in {'training' if training else 'evaluation'}"
                yield module_case(model, name, sample.forward_input.args, sample.forward_input.kwargs)


MODULES = [info for info in module_db if not RECURRENT.match(info.name)]


@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_module(info: Any) -> None:
    """`grad_sample` is the loop's, or fxgrad refuses the input and the refusal is written down."""
    report = examine(module_cases(info, one_in=MANY.get(info.name, 1)))
    print(f"{info.name}: {report}")
    assert not report.wrong, "\n".join(report.wrong)
    assert report.refused.keys() <= REFUSED.get(info.name, set())


@pytest.mark.long
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_every_input_of_module(info: Any) -> None:
    """No input is left out, and every reason on the list occurs."""
    report = examine(module_cases(info))
    print(f"{info.name}: {report}")
    assert not report.wrong, "\n".join(report.wrong)
    assert report.refused.keys() == REFUSED.get(info.name, set())
