"""A whole training step behind torch.compile: what runs inside its backward, Dynamo leaves alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import UnclippedGrad
from tests.quick import long_but

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo looks at p.grad of what is no leaf

QUANTITIES: dict[str, Callable[[], Any]] = {
    "clipped": lambda: fxgrad.ClippedGrad(max_grad_norm=0.5),
    "rows": fxgrad.GradSample,
    "norms beside": lambda: [fxgrad.ClippedGrad(max_grad_norm=0.5, outside="allow"), fxgrad.NormSample()],
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def found(model: nn.Module) -> list[Any]:
    values = [value for p in model.parameters() for value in (p.detach(), getattr(p, "grad_sample", p.grad))]
    return [value.clone() for value in values if value is not None]


@pytest.mark.parametrize(
    ("name", "steps_before", "backend"),
    long_but(
        lambda name, steps_before, backend: backend == "aot_eager" and (name == "clipped" or steps_before == 0),
        itertools.product(QUANTITIES, (0, 1), ("eager", "aot_eager")),
    ),
)
def test_as_the_same_step_alone(name: str, steps_before: int, backend: str) -> None:
    sides = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = network()
        view = fxgrad.transform(model, quantity=QUANTITIES[name](), backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor, y: Tensor, model: Any = model, view: Any = view, optimizer: Any = optimizer) -> Tensor:
            fxgrad.zero_grad(model)
            loss = F.cross_entropy(view(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = torch.compile(step, backend="aot_eager") if compiled else step
        states = []
        for i in range(4):
            generator = torch.Generator().manual_seed(i)
            x = torch.randn(4 + i % 2, 3, dtype=torch.float64, generator=generator)
            y = torch.randint(2, (len(x),), generator=generator)
            states.append([(step if i < steps_before else run)(x, y), *found(model)])
        sides.append(states)
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_guard_is_met() -> None:
    model = network()
    view = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(max_grad_norm=0.5), backend="aot_eager")
    before = copy.deepcopy(model.state_dict())

    def step(x: Tensor) -> None:
        (view(x).sum() + model[0].weight.square().sum()).backward()  # type: ignore[index]

    with pytest.raises(UnclippedGrad, match="was used outside of the transformed"):
        torch.compile(step, backend="aot_eager")(torch.randn(4, 3, dtype=torch.float64))
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before)


def test_sizes_that_the_user_makes_dynamic() -> None:
    """They are for the user's graph: in fxgrad's an epsilon of a norm stays the number that it is."""
    layer = nn.Linear(3, 4)
    model = nn.Sequential(layer, nn.LayerNorm(4)).double()
    view = fxgrad.transform(model, backend="eager")

    def step(x: Tensor) -> None:
        view.zero_grad()
        view(x).square().sum().backward()

    run = torch.compile(step, backend="eager", dynamic=True)
    for size in (5, 1, 3):
        run(torch.randn(size, 3, dtype=torch.float64))
        assert fxgrad.delivered(layer.weight).shape == (size, 4, 3)
