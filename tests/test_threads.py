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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_step_is_compiled_while_another_model_runs() -> None:
    """What Dynamo traces in one thread is not for the call that runs in the other."""
    inside, go_on = threading.Event(), threading.Event()

    def waiting(gm: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            inside.set()
            go_on.wait(60)
            return gm(*args)

        return run

    slow, quick = fxgrad.transform(Net(4), backend=waiting), fxgrad.transform(Net(5), backend="eager")
    thread = threading.Thread(target=lambda: slow(torch.randn(6, 3)))
    thread.start()
    assert inside.wait(60)

    def step(x: Tensor) -> None:
        quick(x).square().sum().backward()

    try:
        torch.compile(step, backend="eager")(torch.randn(4, 3))
    finally:
        go_on.set()
        thread.join()
    assert fxgrad.delivered(quick.body.weight).shape == (4, 5, 3)


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
