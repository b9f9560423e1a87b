"""What will not fit into memory is an error before it runs, with what takes the memory and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fxgrad
from fxgrad.compile import memory_limit as room
from fxgrad.errors import NotEnoughMemory, OptionError


def layer() -> Any:
    return nn.Linear(30, 10)


def test_a_batch_that_will_not_fit() -> None:
    model = layer()
    with pytest.raises(NotEnoughMemory) as caught:
        fxgrad.transform(model, backend="eager", memory_limit=10_000)(torch.randn(100, 30))
    assert str(caught.value).splitlines() == [
        "a batch of 100 takes 124 kB for its gradients, and 10 kB memory_limit= allows",
        "  what                      bytes",
        "  grad_sample of 'weight'  120 kB",
        "  grad_sample of 'bias'      4 kB",
        "  total                    124 kB",
        "  Take batches of at most 8 samples, or ask for what is made of the gradients (ClippedGrad, NormSample, "
        "GradDot). memory_limit=None leaves the check out.",
    ]
    assert not hasattr(model.weight, "grad_sample")


def test_a_larger_batch_than_those_before() -> None:
    model = layer()
    view = fxgrad.transform(model, backend="eager", memory_limit=100_000)
    for size in (50, 80, 10):  # 1,240 bytes a sample
        view(torch.randn(size, 30)).sum().backward()
        assert len(model.weight.grad_sample) == size
        fxgrad.zero_grad(view)
    with pytest.raises(NotEnoughMemory, match="a batch of 81 takes 100 kB") as caught:
        view(torch.randn(81, 30))
    assert "at most 80 samples" in caught.value.advice
    view(torch.randn(80, 30)).sum().backward()


@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(1.0), fxgrad.NormSample()])
def test_what_is_not_multiplied_out_is_not_counted(quantity: Any) -> None:
    view = fxgrad.transform(layer(), quantity=quantity, backend="eager", memory_limit=10_000)
    view(torch.randn(100, 30)).sum().backward()


def test_gradients_that_are_held_are_counted() -> None:
    """The Gram matrix of a convolution's 784 positions is larger than its gradients: these are held."""
    x, clipped = torch.randn(100, 1, 30, 30), fxgrad.ClippedGrad(1.0)
    with pytest.raises(NotEnoughMemory, match=r"gradients of 'weight' +10\.8 kB") as caught:
        fxgrad.transform(nn.Conv2d(1, 3, 3), quantity=clipped, backend="eager", memory_limit=10_000)(x)
    assert 'pass strategy="recompute", which holds no gradients' in caught.value.advice
    view = fxgrad.transform(
        nn.Conv2d(1, 3, 3), quantity=clipped, backend="eager", memory_limit=10_000, strategy="recompute"
    )
    view(x).sum().backward()


def test_as_a_backend() -> None:
    compiled = torch.compile(layer(), backend="fxgrad", options={"backend": "eager", "memory_limit": 10_000})
    with pytest.raises(BackendCompilerFailed, match="NotEnoughMemory: a batch of 100 takes 124 kB"):
        compiled(torch.randn(100, 30))


def test_a_batch_of_one() -> None:
    with pytest.raises(NotEnoughMemory, match="a batch of 1 takes"):
        fxgrad.transform(layer(), backend="eager", memory_limit=1_000)(torch.randn(1, 30))


def test_what_is_free_is_the_limit() -> None:
    with (
        mock.patch.object(room, "free_memory", lambda device: 10_000.0),
        pytest.raises(NotEnoughMemory, match="and 10 kB are free on cpu"),
    ):
        fxgrad.transform(layer(), backend="eager")(torch.randn(100, 30))
    view = fxgrad.transform(layer(), backend="eager", memory_limit=None)
    with mock.patch.object(room, "free_memory", lambda device: 0.0):
        view(torch.randn(100, 30)).sum().backward()


def test_it_is_looked_at_once() -> None:
    looked: list[torch.device] = []

    def free(device: torch.device) -> float:
        looked.append(device)
        return 1e12

    view = fxgrad.transform(layer(), backend="eager")
    with mock.patch.object(room, "free_memory", free):
        for size in (100, 100, 50, 100):
            view(torch.randn(size, 30)).sum().backward()
            fxgrad.zero_grad(view)
        assert len(looked) == 1
        view(torch.randn(101, 30))
    assert looked == [torch.device("cpu")] * 2


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "much"])
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(OptionError, match="memory_limit has to be a positive number of bytes, None or 'free'"):
        fxgrad.transform(layer(), memory_limit=limit)


def test_what_the_system_says(tmp_path: Path) -> None:
    """What is free is what is available and may be swapped; in a container, what its limit leaves."""
    files = {name: tmp_path / name for name in ("max", "current", "stat")}
    group = (*map(str, files.values()), "inactive_file")
    with mock.patch.object(room, "_GROUPS", (group,)):
        system = room.free_memory(torch.device("cpu"))
        assert system > 0
        files["max"].write_text("1000\n")
        files["current"].write_text("700\n")
        files["stat"].write_text("anon 500\ninactive_file 150\n")
        assert room.free_memory(torch.device("cpu")) == 450
        files["max"].write_text("max\n")
        assert room.free_memory(torch.device("cpu")) == pytest.approx(system, rel=0.5)
    assert room.free_memory(torch.device("meta")) == float("inf")
