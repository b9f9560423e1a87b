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
LIGHTNING, PRIVATE, PAIR, STORE, DOTS, JACOBIAN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
B, C = 5, 0.05


def names_of(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def fit(module: Any, loader: Any, folder: Path, epochs: int = 1) -> lightning.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's and Opacus's own
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader)
    return trainer


def digits(n: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(n, 4), torch.randint(3, (n,))), batch_size=batch_size)


def test_lightning(tmp_path: Path) -> None:
    module = names_of(LIGHTNING)["Clipped"]()
    start = [p.detach().clone() for p in module.net.parameters()]
    fit(module, digits(8, 8), tmp_path)
    moved = torch.cat([(p - before).flatten() for p, before in zip(module.net.parameters(), start, strict=True)]).norm()
    assert 0 < moved <= 0.1 * 8 * 1.0  # lr, samples, C


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_with_an_accountant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = names_of(PRIVATE)["Private"](nn.Linear(4, 3), digits(16, 4))
    start = module.net.weight.detach().clone()
    steps = fit(module, None, tmp_path, epochs=2).global_step
    assert steps == 8 and module.engine.accountant.history == [(1.0, 0.25, steps)]
    assert not module.net.weight.equal(start)
    assert capsys.readouterr().out.count("epsilon = ") == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("accumulate", ["error", "overwrite"])
def test_lightning_with_results_on_parameters(tmp_path: Path, accumulate: Any) -> None:
    class Norms(names_of(LIGHTNING)["Clipped"]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            quantities = [fxgrad.Grad(), fxgrad.NormSample()]
            self.net = fxgrad.transform(nn.Linear(4, 3), quantity=quantities, backend="eager", accumulate=accumulate)

    module = Norms()
    if accumulate == "error":
        with pytest.raises(AlreadySet, match=r"accumulate=.*overwrite"):
            fit(module, digits(8, 4), tmp_path)
    else:
        fit(module, digits(8, 4), tmp_path)


def test_store_of_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = names_of(STORE)
    exec(DOTS, names)
    model, loss = names["model"], lambda output, label: F.cross_entropy(output, label, reduction="sum")
    train, test = (
        flat({name: g for name, g in per_sample(model, loss, *names_xy).items()})
        for names_xy in ((names["x"], names["y"]), (names["test_x"], names["test_y"]))
    )
    assert relative_error({"": names["exact"]}, {"": test @ train.T}) < 1e-5
    correlation = torch.corrcoef(torch.stack([names["approximate"].flatten(), (test @ train.T).flatten()]))[0, 1]
    assert correlation > 0.9


def per_sample(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    each = [torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), [*parameters.values()]) for i in range(len(x))]
    return {name: torch.stack(grads) for name, *grads in zip(parameters, *each, strict=True)}


def test_jacobians() -> None:
    names = names_of(JACOBIAN)
    model, x = names["model"], names["x"]
    truth = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(dict(model.named_parameters()))
    assert relative_error(names["jacobian"], truth) < 1e-5


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
