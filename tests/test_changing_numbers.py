"""Models whose numbers change between calls: temperatures, weights of losses, epsilons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import GraphBreak, MixedSamples, TooManyGraphs
from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED

Body = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    number: float
    other: float

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.number, self.other = body, 0.5, 2.0
        self.first = nn.Linear(4, 4)
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x, self.first(x))


def attention(h: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, scale=scale)


# A symbol in the graph: one graph for all values.
SYMBOLIC: dict[str, Body] = {
    "temperature": lambda model, x, h: torch.softmax(h / model.number, -1),
    "leak": lambda model, x, h: F.leaky_relu(h, model.number),
    "weight": lambda model, x, h: F.linear(x, model.first.weight * model.number),
}
# PyTorch asks what the number is: a graph for each value.
CONSTANT: dict[str, Body] = {
    "layer norm": lambda model, x, h: F.layer_norm(h, (4,), model.scale, model.shift, model.number),
    "group norm": lambda model, x, h: F.group_norm(h, 2, model.scale, model.shift, model.number),
    "attention": lambda model, x, h: attention(h[:, None, None] * model.scale, model.number)[:, 0, 0],
    "power": lambda model, x, h: (h.abs() + 1) ** model.number * model.scale,
    "alpha": lambda model, x, h: torch.add(h, model.scale, alpha=model.number),
    "addmm": lambda model, x, h: torch.addmm(model.shift, x, model.first.weight, beta=model.number, alpha=model.number),
    "lerp": lambda model, x, h: torch.lerp(h, x, model.number),
    "both": lambda model, x, h: torch.lerp(h * model.other, x, model.number),
}


def clipped(model: nn.Module, transformed: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    transformed(x).square().sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("name", [*SYMBOLIC, *CONSTANT])
def test_each_value_counts(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Model((SYMBOLIC | CONSTANT)[name]).double()
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(0.1), backend=backend)
    x = torch.randn(3, 4, dtype=torch.float64)
    for number in (0.5, 0.7, 0.9, 0.3):
        model.number, model.other = number, 1 + number
        actual = clipped(model, transformed, x)
        expected = [torch.zeros_like(p) for p in model.parameters()]
        for sample in x.split(1):
            loss = model(sample).square().sum()
            grads = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
            norm = torch.cat([grad.flatten() for grad in grads]).norm()
            for total, grad in zip(expected, grads, strict=True):
                total += grad * (0.1 / (norm + 1e-6)).clamp(max=1)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CONSTANT)
def test_under_torch_compile(name: str) -> None:
    model = Model(CONSTANT[name]).double()
    compiled = torch.compile(model, backend="fxgrad", options={"backend": "aot_eager"})
    x = torch.randn(3, 4, dtype=torch.float64)
    for number in (0.5, 0.7, 0.3):
        model.number = number
        compiled(x).sum().backward()
        actual = model.first.weight.grad_sample.clone()  # type: ignore[attr-defined]
        for i, sample in enumerate(x.split(1)):
            (expected,) = torch.autograd.grad(model(sample).sum(), model.first.weight)
            torch.testing.assert_close(actual[i], expected)
        fxgrad.zero_grad(model)


def test_what_is_refused_is_refused_with_its_own_reason() -> None:
    model = Model(lambda model, x, h: torch.lerp(h, h.mean(0), model.number))
    transformed = fxgrad.transform(model, backend="eager")
    for number in (0.5, 0.7, 0.7):
        model.number = number
        with pytest.raises(MixedSamples, match="mean"):
            transformed(torch.randn(3, 4))


def test_a_number_that_the_data_decides_is_refused() -> None:
    model = Model(lambda model, x, h: F.layer_norm(h, (4,), model.scale, model.shift, model.scale.sum().item()))
    transformed = fxgrad.transform(model, backend="eager")
    for number in (0.5, 0.7):
        model.number = number
        with pytest.raises(GraphBreak, match="data-dependent"):
            transformed(torch.randn(3, 4) * model.number)


def test_a_value_for_each_call_comes_to_the_limit_of_graphs() -> None:
    model = Model(CONSTANT["attention"])
    transformed = fxgrad.transform(model, backend="eager")
    with pytest.raises(TooManyGraphs, match=r"self\.number was 0\.1, 0\.2"):
        for number in range(1, 20):
            model.number = number / 10
            transformed(torch.randn(3, 4)).sum().backward()
            fxgrad.zero_grad(model)


def test_the_numbers_of_another_model_stay_symbols() -> None:
    made: list[Any] = []

    def counted(gm: Any, inputs: Any) -> Any:
        made.append(gm)
        return gm

    x = torch.randn(3, 4)
    for body, graphs in ((CONSTANT["layer norm"], 4), (lambda model, x, h: h * model.number, 2)):
        made.clear()
        model = Model(body)
        transformed = fxgrad.transform(model, backend=counted)
        for number in (0.5, 0.7, 0.9, 0.3):
            model.number = number
            transformed(x).sum().backward()
            fxgrad.zero_grad(model)
        assert len(made) == graphs


def test_per_sample_grads_of_the_module() -> None:
    model = Model(CONSTANT["power"])
    for number in (0.5, 0.7):
        model.number = number
        assert_per_sample_grads(model, torch.randn(3, 4), backend="eager")
