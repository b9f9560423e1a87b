"""Two threads compile at once: their own models on one input, and what PyTorch was told is taken back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends import opt_einsum

import fxgrad
from fxgrad.capture.dynamo import MARKS


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bo,o->bo", self.head(self.body(x).tanh()), torch.ones(2))


def together(*tasks: Any) -> list[BaseException]:
    """Run these at the same time; what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def run(task: Any) -> None:
        start.wait()
        try:
            task()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("turn", range(5))
def test_models_that_share_an_input(turn: int) -> None:
    models = [Net(width) for width in (4, 5, 6)]
    views = [fxgrad.transform(model, backend="eager") for model in models]
    shared = torch.randn(6, 3)
    silent = torch._guards.log.disabled

    def train(view: Any) -> None:
        for x in (shared, shared[:4], shared):
            fxgrad.zero_grad(view)
            view(x).square().sum().backward()

    assert together(*(lambda view=view: train(view) for view in views)) == []
    assert opt_einsum.enabled and torch._guards.log.disabled == silent
    assert not vars(shared).keys() & set(MARKS)
    for model in models:
        rows = []
        for i in range(len(shared)):
            loss = model(shared[i : i + 1]).square().sum()
            rows.append(torch.autograd.grad(loss, model.body.weight)[0])
        torch.testing.assert_close(model.body.weight.grad_sample, torch.stack(rows))  # type: ignore[attr-defined]
