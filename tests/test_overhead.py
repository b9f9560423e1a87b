"""What a step under a guard costs in Python, counted: time varies, calls do not."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.store import Store

PACKAGE = str(Path(fxgrad.__file__).parent)
OPERATORS = str(Path(fxgrad.__file__).parent / "kernels")  # what they compute; Inductor compiles most of it


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).relu()
        return x, x * 2


def calls_of_a_step(layers: int) -> Counter[str]:
    """How often a step calls each of fxgrad's functions, for a model with two parameters in each layer."""
    model = Layers(layers)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="aot_eager")
    x = torch.randn(3, 4)
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.startswith(OPERATORS):
            calls[frame.f_code.co_name] += 1

    for measured in (False, False, True):
        private.zero_grad()
        if measured:
            sys.setprofile(note)
        try:
            sum(out.sum() for out in private(x)).backward()
        finally:
            sys.setprofile(None)
    return calls


def test_calls_of_a_step() -> None:
    """Whoever adds a call to each step sees it here: one for a parameter, its hook, and 86 others."""
    few, many = calls_of_a_step(2), calls_of_a_step(6)
    assert many.total() - few.total() <= 8
    assert few.total() - 4 <= 86


def test_one_check_for_each_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's outputs and the model's are the same tensors: their node has one hook."""
    begun: list[Forward] = []
    original = Store.begin_backward

    def begin_backward(store: Store, forward: Forward) -> None:
        begun.append(forward)
        original(store, forward)

    monkeypatch.setattr(Store, "begin_backward", begin_backward)
    private = fxgrad.transform(Layers(2), quantity=fxgrad.ClippedGrad(1.0), backend="aot_eager")
    for _ in range(2):
        begun.clear()
        sum(out.sum() for out in private(torch.randn(3, 4))).backward()
        assert len(begun) == 1
