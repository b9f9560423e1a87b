"""Checkpoints of an Opacus script continue under fxgrad.opacus.PrivacyEngine, and the names of its wrapper exist."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fxgrad.opacus import PrivacyEngine
from fxgrad.opacus.checkpoints import unwrapped
from tests.opacus_settings import WARNINGS

pytestmark = WARNINGS


class Net(nn.Module):
    """It has a buffer, and a layer whose state has a version."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.norm.eval().requires_grad_(False)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).tanh()) * self.count
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


class Script:
    """A user's script with one of the two engines, without sampling or noise."""

    def __init__(self, engine: Any, model: nn.Module, **arguments: Any) -> None:
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        self.engine = engine
        self.model, self.optimizer, self.loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9),
            data_loader=DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=0.1,
            poisson_sampling=False,
            **arguments,
        )[:3]

    def train(self) -> Script:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return self

    def save(self, path: Any) -> None:
        self.engine.save_checkpoint(path=path, module=self.model, optimizer=self.optimizer)

    def load(self, path: Any) -> Script:
        self.engine.load_checkpoint(path=path, module=self.model, optimizer=self.optimizer)
        return self

    def values(self) -> dict[str, Tensor]:
        return dict(unwrapped(net(), self.model.state_dict()))


def theirs(seed: int = 0) -> Script:
    return Script(opacus.PrivacyEngine(accountant="rdp"), net(seed))


def ours(seed: int = 0, **arguments: Any) -> Script:
    return Script(PrivacyEngine(accountant="rdp"), net(seed), backend="eager", **arguments)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() == net().state_dict().keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("saved_by", [theirs, ours])
def test_a_checkpoint_continues(saved_by: Any, tmp_path: Path) -> None:
    first = saved_by().train()
    first.save(tmp_path / "point")
    second = ours(seed=7).load(tmp_path / "point")
    assert_same(second.values(), first.values())
    assert second.engine.accountant.history == first.engine.accountant.history != []
    assert_same(second.train().values(), theirs().train().train().values())


def test_a_checkpoint_loads_into_a_model_that_is_not_prepared(tmp_path: Path) -> None:
    first = theirs().train()
    first.save(tmp_path / "point")
    model = net(seed=7)
    with pytest.warns(UserWarning, match="optimizer is not provided"):
        PrivacyEngine(accountant="rdp").load_checkpoint(path=tmp_path / "point", module=model)
    assert_same(model.state_dict(), first.values())


def test_a_state_dict_of_opacus_loads() -> None:
    state = theirs().train().model.state_dict()
    names = list(state)
    assert all(name.startswith("_module.") for name in names)
    script = ours(seed=7)
    assert not script.model.load_state_dict(state).missing_keys
    assert_same(script.values(), dict(unwrapped(net(), state)))
    assert list(state) == names  # the user's own
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    script.model.load_state_dict(state_dict=torch.load(file), strict=True)


def test_the_versions_of_layers_are_kept() -> None:
    state: Any = unwrapped(net(), theirs().model.state_dict())
    assert state._metadata == net().state_dict()._metadata  # type: ignore[attr-defined]


def test_what_does_not_fit_is_refused_as_by_pytorch() -> None:
    state = theirs().model.state_dict()
    script = ours()
    with pytest.raises(RuntimeError, match=r'Missing key.*"first.weight"'):
        script.model.load_state_dict({name: p for name, p in state.items() if name != "_module.first.weight"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"_module.first.weight"'):
        script.model.load_state_dict({**state, "other": torch.ones(1)})
    found = script.model.load_state_dict({"_module.first.bias": torch.full((4,), 3.0)}, strict=False)
    assert "first.bias" not in found.missing_keys and script.model.first.bias.eq(3.0).all()


class Holder(nn.Module):
    """A model with a submodule of that name."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self._module = nn.Linear(3, 2)
        if other:
            self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._module(x)
        return self.last(out) if hasattr(self, "last") else out


@pytest.mark.parametrize("other", [False, True])
def test_a_submodule_of_that_name(other: bool) -> None:
    model, engine = Holder(other), PrivacyEngine(accountant="rdp")
    script = Script(engine, model, backend="eager")
    assert script.model._module is dict(model.named_children())["_module"]
    before = model.state_dict()
    wrapped = Script(opacus.PrivacyEngine(accountant="rdp"), Holder(other)).model.state_dict()
    script.model.load_state_dict(wrapped)
    assert all(value.equal(wrapped[f"_module.{name}"]) for name, value in model.state_dict().items())
    script.model.load_state_dict(before)


@pytest.mark.parametrize("arguments", [dict(), dict(grad_sample_mode="ghost")], ids=["hooks", "ghost"])
def test_the_model_itself(arguments: dict[str, Any]) -> None:
    model = net()
    script = Script(PrivacyEngine(accountant="rdp"), model, backend="eager", **arguments)
    assert script.model._module is model
    assert type(script.model) is not Net and not hasattr(model, "_module")
    assert script.model.state_dict().keys() == model.state_dict().keys()
    again = Script(PrivacyEngine(accountant="rdp"), script.model, backend="eager", **arguments)
    assert again.model is script.model and again.model._module is model
    assert again.model.load_state_dict(theirs().model.state_dict()).missing_keys == []
