"""The programs of docs/recipes.md run; a model that is called twice has the loop's gradients in every quantity."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
from fxgrad.errors import AlreadySet
from fxgrad.testing import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
LIGHTNING, PAIR = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
B, C = 5, 0.05


def names_of(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def test_lightning(tmp_path: Path) -> None:
    module = names_of(LIGHTNING)["Clipped"]()
    start = [p.detach().clone() for p in module.net.parameters()]
    batch = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        ).fit(module, DataLoader(batch, batch_size=8))
    moved = torch.cat([(p - before).flatten() for p, before in zip(module.net.parameters(), start, strict=True)]).norm()
    assert 0 < moved <= 0.1 * 8 * 1.0  # lr, samples, C


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def pair_of() -> nn.Module:
    return names_of(PAIR)["Pair"](encoder())


def inputs(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return first, second


def loss_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return (1 - F.cosine_similarity(*outputs)).sum()


def rows(n: int) -> dict[str, Tensor]:
    """The loop over single pairs."""
    model, (first, second) = pair_of(), inputs(n)
    parameters = dict(model.named_parameters())
    grads = [
        torch.autograd.grad(loss_of(model(first[i : i + 1], second[i : i + 1])), [*parameters.values()])
        for i in range(n)
    ]
    return {name: torch.stack(each) for name, *each in zip(parameters, *grads, strict=True)}


def flat(each: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in each.values()], 1)


def clipped(each: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = (C / flat(each).norm(dim=1)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", weights, g) for name, g in each.items()}


class Units(nn.Module):
    """The gradient of sample i is row i of the input: all parameters in one vector."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():  # projections go by the parameters' names
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([p.flatten() for p in self.parameters()])


PROJECTION = fxgrad.GradProjection(7, seed=3)


def projected(each: dict[str, Tensor], model: nn.Module) -> Tensor:
    """Each row by the matrix that `PROJECTION` makes of unit gradients."""
    gs = fxgrad.transform(Units(model), quantity=PROJECTION, backend="eager")
    gs(torch.eye(flat(each).shape[1], dtype=torch.float64)).sum().backward()
    matrix: Tensor = fxgrad.result(gs, PROJECTION)  # [elements, 7]
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, 7**-0.5))
    return flat(each) @ matrix


DIRECTION = {name: torch.ones_like(p) for name, p in pair_of().named_parameters()}
QUANTITIES: dict[str, tuple[fxgrad.Quantity, Any]] = {
    "GradSample": (fxgrad.GradSample(), lambda each: each),
    "Grad": (fxgrad.Grad(), lambda each: {name: g.sum(0) for name, g in each.items()}),
    "NormSample": (fxgrad.NormSample(), lambda each: flat(each).norm(dim=1)),
    "ClippedGrad": (fxgrad.ClippedGrad(C), clipped),
    "SquaredGrad": (fxgrad.SquaredGrad(), lambda each: {name: g.square().sum(0) for name, g in each.items()}),
    "GradVariance": (fxgrad.GradVariance(), lambda each: {name: g.var(0) for name, g in each.items()}),
    "GradDot": (fxgrad.GradDot(DIRECTION), lambda each: flat(each).sum(1)),
    "GradProjection": (PROJECTION, lambda each: projected(each, pair_of())),
    "GradGram": (fxgrad.GradGram(), lambda each: flat(each) @ flat(each).T),
}
IN_P_GRAD = ("Grad", "ClippedGrad")


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_pair_in_every_quantity(name: str) -> None:
    quantity, truth = QUANTITIES[name]
    reports: list[Any] = []
    model = pair_of()
    gs = fxgrad.transform(model, quantity=quantity, backend="eager", on_result=lambda _, result: reports.append(result))
    loss_of(gs(*inputs(B))).backward()
    [found] = reports
    if name in IN_P_GRAD:
        found = {name: p.grad for name, p in model.named_parameters()}
    expected = truth(rows(B))
    if isinstance(expected, Tensor):
        found, expected = {"": found}, {"": expected}
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["NormSample", "ClippedGrad", "GradVariance", "GradGram", "SquaredGrad"])
def test_two_calls_are_refused_and_the_advice_is_the_recipe(name: str) -> None:
    gs = fxgrad.transform(encoder(), quantity=QUANTITIES[name][0], backend="eager")
    first, second = inputs(B)
    with pytest.raises(AlreadySet, match="two forwards of the model meet in one backward") as caught:
        loss_of((gs(first), gs(second))).backward()
    assert "return self.model(a), self.model(b)" in caught.value.advice


OF_THE_ENCODER = {name.removeprefix("encoder."): one for name, one in DIRECTION.items()}
ADD_UP: dict[str, tuple[fxgrad.Quantity, Any]] = {
    "GradSample": QUANTITIES["GradSample"],
    "GradDot": (fxgrad.GradDot(OF_THE_ENCODER), QUANTITIES["GradDot"][1]),
    "GradProjection": (PROJECTION, lambda each: projected(each, encoder())),
}


@pytest.mark.parametrize("name", ADD_UP)
def test_two_calls_add_up_in_linear_quantities(name: str) -> None:
    """What is linear in the gradients needs no module for the pair."""
    quantity, truth = ADD_UP[name]
    reports: list[Any] = []
    gs = fxgrad.transform(
        encoder(), quantity=quantity, backend="eager", on_result=lambda _, result: reports.append(result)
    )
    for step in range(2):
        gs.zero_grad()
        first, second = inputs(B)
        loss_of((gs(first), gs(second))).backward()
        assert len(reports) == step + 1
        expected = truth({name.removeprefix("encoder."): g for name, g in rows(B).items()})
        found = reports[-1]
        if isinstance(expected, Tensor):
            torch.testing.assert_close(fxgrad.result(gs, quantity), found)
            found, expected = {"": found}, {"": expected}
        assert relative_error(found, expected) < 1e-9
