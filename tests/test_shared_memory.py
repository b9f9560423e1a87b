"""Inputs that share memory, with each other, within themselves or with the model, in models that write to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.capture.shared_memory import Write, Writes, apart, copies
from fxgrad.errors import LostLayout
from fxgrad.testing import assert_per_sample_grads

B = 5
QUANTITIES = [fxgrad.GradSample(), fxgrad.NormSample(), fxgrad.ClippedGrad(0.3)]


class Model(nn.Module):
    memory: Tensor

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("memory", torch.randn(B, 4))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def written(m: Model, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x.mul_(z[:, None])
    return (x @ m.w) * y


def written_late(m: Model, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    h = x @ m.w
    y.copy_(z[:, None].expand_as(y))
    return h * y


def written_by_relu(m: Model, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (F.relu(x, inplace=True) @ m.w) * y


def written_by_out(m: Model, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    torch.mul(y, z[:, None], out=x)
    return (x @ m.w) * y


def assigned(m: Model, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x[:, 0] = z
    return (x @ m.w) * y


def read(m: Model, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x @ m.w) * y * z[:, None]


WRITERS = [written, written_late, written_by_relu, written_by_out, assigned]


def next_steps() -> tuple[Tensor, Tensor]:
    series = torch.randn(B + 1, 4)
    return series[:-1], series[1:]


def windows() -> tuple[Tensor, Tensor]:
    series = torch.randn(B + 3)
    return series.unfold(0, 4, 1), series.unfold(0, 4, 1)


def of_numpy() -> tuple[Tensor, Tensor]:
    """Two storages at the same addresses."""
    series = np.random.default_rng(0).standard_normal((B + 1, 4)).astype(np.float32)
    return torch.from_numpy(series[:-1]), torch.from_numpy(series[1:])


def of_two_dtypes() -> tuple[Tensor, Tensor]:
    series = torch.randn(B + 1, 8)
    return series[:-1, :4], series.view(torch.complex64)[1:]


def both_orders() -> tuple[Tensor, Tensor]:
    square = torch.randn(B * 4)
    return square.view(B, 4), square.view(4, B).t()


SHARING = [next_steps, windows, of_numpy, both_orders]
# Dynamo refuses an out= that is not contiguous.
CASES = [(f, inputs) for f in WRITERS for inputs in SHARING if (f, inputs) != (written_by_out, windows)]


@pytest.mark.parametrize("quantity", QUANTITIES, ids=str)
@pytest.mark.parametrize(("function", "inputs"), CASES)
def test_writes_are_refused(function: Any, inputs: Any, quantity: Any) -> None:
    model = Model(function)
    x, y = inputs()
    before = x.clone(), y.clone(), model.memory.clone()
    view = fxgrad.transform(model, quantity=quantity, backend="eager")
    with pytest.raises(LostLayout, match="which samples are read there afterwards cannot be followed") as raised:
        view(x, y, torch.randn(B))
    assert "Pass a copy, x.clone()" in str(raised.value) and "test_shared_memory.py" in str(raised.value)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])  # before anything is written


@pytest.mark.parametrize("function", WRITERS)
def test_the_same_graph_takes_other_memory(function: Any) -> None:
    """The check is one of each call."""
    view = fxgrad.transform(Model(function), backend="eager")
    x, y = next_steps()
    view(x.clone(), y.clone(), torch.randn(B))
    with pytest.raises(LostLayout, match="shares memory with input"):
        view(x, y, torch.randn(B))


@pytest.mark.parametrize("inputs", SHARING)
def test_what_is_only_read_may_share(inputs: Any) -> None:
    x, y = inputs()
    assert fxgrad.verify(Model(read), x, y, torch.randn(B)).ok
    assert_per_sample_grads(Model(read), x, y, torch.randn(B), backend="eager", tolerance=1e-4)


def test_parts_of_one_tensor_may_be_written() -> None:
    """No element is in both."""
    for dim in (0, 1):
        torch._dynamo.reset()
        d = torch.randn(B, 8) if dim else torch.randn(2 * B, 4)
        model, z = Model(written), torch.randn(B)
        plain = model(*d.clone().chunk(2, dim), z)
        view = fxgrad.transform(model, backend="eager")
        torch.testing.assert_close(view(*d.chunk(2, dim), z), plain)
        assert fxgrad.verify(model, *d.chunk(2, dim), z).ok


def test_other_dtypes_are_other_views() -> None:
    def real(m: Model, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return (x @ m.w) * y.real

    with pytest.raises(LostLayout, match="shares memory"):
        fxgrad.transform(Model(real), backend="eager")(*of_two_dtypes())


def test_the_models_own_memory() -> None:
    def memory(m: Model, x: Tensor) -> Tensor:
        m.memory.add_(1)
        return x @ m.w

    def inputs(m: Model, x: Tensor) -> Tensor:
        x.mul_(2)
        return x @ m.w * m.memory.sum()

    def parameter(m: Model, x: Tensor) -> Tensor:
        x.mul_(2)
        return x @ m.w

    for function, words in (
        (memory, r"add_ writes to 'memory', which shares memory with input"),
        (inputs, r"mul_ writes to input '.*', which shares memory with 'memory'"),
        (parameter, r"mul_ writes to input '.*', which shares memory with parameter 'w'"),
    ):
        torch._dynamo.reset()
        model = Model(function)
        x = model.w.detach() if function is parameter else model.memory.view(B, 4)
        with pytest.raises(LostLayout, match=words):
            fxgrad.transform(model, backend="eager")(x)
        fxgrad.transform(model, backend="eager")(x.clone())


def test_weights_of_samples() -> None:
    clipped = fxgrad.ClippedGrad(1.0, sample_weight=True)
    view = fxgrad.transform(Model(written), quantity=clipped, backend="eager")
    x, y, z = torch.rand(B, 4), torch.rand(B, 4), torch.rand(B)
    with pytest.raises(LostLayout, match="shares memory with sample_weight"):
        view(x, y, z, sample_weight=x[:, 0])


def test_verify_sees_it() -> None:
    for inputs in (next_steps, windows, of_numpy):
        torch._dynamo.reset()
        verdict = fxgrad.verify(Model(written), *inputs(), torch.randn(B))
        assert not verdict.ok and isinstance(verdict.refusal, LostLayout)


def test_verify_needs_no_check_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writes, "check", lambda self, values: None)
    verdict = fxgrad.verify(Model(written), *next_steps(), torch.randn(B))
    assert not verdict.ok and verdict.influences


def test_a_step_without_writes_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writes, "check", lambda self, values: 1 / 0)
    fxgrad.transform(Model(read), backend="eager")(*next_steps(), torch.randn(B))


def test_regions() -> None:
    memory = torch.arange(24.0)
    assert apart(memory.view(4, 6)[:, ::2]) and apart(memory.view(4, 6).t()) and apart(memory[:1].expand(1, 1))
    assert apart(memory.as_strided((2, 3), (3, 2))[:1])
    assert not apart(memory.unfold(0, 4, 1)) and not apart(memory[:1].expand(3))
    assert apart(memory.as_strided((2, 2), (2, 3))) and not apart(memory.as_strided((2, 3), (2, 1)))
    writes = Writes({0: Write("mul_", "")}, ["input 'x'", "input 'y'"])
    writes.check((memory[::2], memory[1::2]))
    writes.check((memory[:0], memory))
    with pytest.raises(LostLayout, match="'x', which shares memory with input 'y'"):
        writes.check((memory[::2], memory[1::3]))


def test_copies() -> None:
    memory = torch.arange(12.0)
    tensors = {"a": memory[:8], "b": memory[4:].view(torch.int32), "c": memory[:1].expand(3), "d": torch.ones(2)}
    new = copies(tensors, {"a"})
    assert all(torch.equal(new[key], x) and new[key].stride() == x.stride() for key, x in tensors.items())
    new["a"][4:] = 0
    assert torch.equal(new["b"][:4], torch.zeros(4, dtype=torch.int32)) and memory[4] == 4
    new = copies({"a": memory[:8], "b": memory[4:]}, set(), double=True)
    new["a"].zero_()
    assert new["b"].dtype == torch.float64 and torch.equal(new["b"], memory[4:].double())
