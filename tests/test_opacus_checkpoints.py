"""Checkpoints of an Opacus script continue under fxgrad.opacus.PrivacyEngine, and the names of its wrapper exist."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fxgrad.errors import OptionError
from fxgrad.opacus import PrivacyEngine, fix
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
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9),
            data_loader=DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4),
            noise_multiplier=0.0,
            max_grad_norm=0.1,
            poisson_sampling=False,
            **arguments,
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]

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


def test_a_checkpoint_continues_under_opacus(tmp_path: Path) -> None:
    first, second = ours().train(), theirs(seed=7)
    first.save(tmp_path / "point")
    second.engine.load_checkpoint(path=tmp_path / "point", module=second.model._module, optimizer=second.optimizer)
    assert_same(second.values(), first.values())
    assert_same(second.train().values(), first.train().values())
    assert second.engine.accountant.history == first.engine.accountant.history


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


@pytest.mark.parametrize("arguments", [dict(), dict(grad_sample_mode="ghost")], ids=["hooks", "ghost"])
def test_a_copy_of_a_private_model(arguments: dict[str, Any]) -> None:
    """It trains with an optimizer of its own."""
    script = ours(**arguments).train()
    for copied in (copy.deepcopy(script.model), pickle.loads(pickle.dumps(script.model))):
        assert type(copied._module) is Net and copied._module.first is copied.first is not script.model.first
        assert copied.load_state_dict(theirs(seed=7).model.state_dict()).missing_keys == []
        assert_same(dict(copied.state_dict()), theirs(seed=7).values())
        copied.load_state_dict(script.model.state_dict())
        second = Script(PrivacyEngine(accountant="rdp"), copied, backend="eager", **arguments)
        assert second.model is copied
        again = copy.deepcopy(copied)
        assert type(again._module) is Net and again._module is not copied._module
        second.train()
        assert not second.model.first.weight.equal(script.model.first.weight)


@pytest.fixture()
def process(tmp_path: Path) -> Iterator[None]:
    """Several processes, of which there is one."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process")
class TestSeveralProcesses:
    """Wrappers of DistributedDataParallel have further names, on either side of Opacus's."""

    def states(self, model: nn.Module) -> dict[str, Any]:
        wrapped = DifferentiallyPrivateDistributedDataParallel(model)
        found = {
            "_module.module.": Script(opacus.PrivacyEngine(accountant="rdp"), wrapped).model.state_dict(),
            "module.": wrapped.state_dict(),
            "module._module.": nn.parallel.DistributedDataParallel(opacus.GradSampleModule(model)).state_dict(),
        }
        assert all(name.startswith(prefix) for prefix, state in found.items() for name in state)
        return found

    @pytest.mark.parametrize("prefix", ["_module.module.", "module._module.", "module."])
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_their_state_dicts_load(self, prefix: str, wrapped: bool) -> None:
        state = self.states(net(2))[prefix]
        names = list(state)
        script = Script(PrivacyEngine(accountant="rdp"), self.wrapped(net(7)) if wrapped else net(7), backend="eager")
        assert not any(script.model.load_state_dict(state))
        model = script.model.module if wrapped else script.model
        assert_same(model.state_dict(), net(2).state_dict())
        assert list(state) == names and any(name.startswith(prefix[:-1]) for name in state._metadata)

    def wrapped(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)

    @pytest.mark.parametrize("saved", [False, True])
    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_checkpoint_continues(self, saved: bool, loaded: bool, tmp_path: Path) -> None:
        """Opacus puts the optimizer's state and the accountant's beside the model's."""
        first = Script(opacus.PrivacyEngine(accountant="rdp"), self.wrapped(net()) if saved else net()).train()
        first.save(tmp_path / "point")
        model = self.wrapped(net(seed=7)) if loaded else net(seed=7)
        second = Script(PrivacyEngine(accountant="rdp"), model, backend="eager").load(tmp_path / "point")
        expected = theirs().train()
        assert_same(dict(unwrapped(net(), second.model.state_dict())), expected.values())
        assert second.engine.accountant.history == first.engine.accountant.history != []
        second.train()
        assert_same(dict(unwrapped(net(), second.model.state_dict())), expected.train().values())
        second.model.load_state_dict(theirs(seed=5).model.state_dict())
        assert_same(dict(unwrapped(net(), second.model.state_dict())), theirs(seed=5).values())

    def test_what_does_not_fit_is_refused_as_by_pytorch(self) -> None:
        script = Script(PrivacyEngine(accountant="rdp"), self.wrapped(net()), backend="eager")
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"_module.module.other"'):
            script.model.load_state_dict({"_module.module.other": torch.ones(1)})


class Reads(nn.Module):
    """A layer of Opacus inside a model: its state dict has each parameter under two names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(x[:, None])[0].flatten(1)[:, :4])
        return out


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: DPRNN(3, 4, batch_first=True),
    "lstm": lambda: DPLSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "gru": lambda: DPGRU(3, 4, bias=False, batch_first=True),
}


@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
class TestLayersOfOpacus:
    def prepared(self, engine: Any, layer: Callable[[], nn.Module], seed: int, **arguments: Any) -> Script:
        torch.manual_seed(seed)
        return Script(engine(accountant="rdp"), Reads(layer()), **arguments)

    def test_a_checkpoint_continues_in_a_fixed_model(self, layer: Any, tmp_path: Path) -> None:
        first = self.prepared(opacus.PrivacyEngine, layer, 0).train()
        first.save(tmp_path / "point")
        second = self.prepared(PrivacyEngine, layer, 7, fix=True, backend="eager").load(tmp_path / "point")
        assert type(second.model.layer) in (nn.RNN, nn.LSTM, nn.GRU)
        for script in (first, second):
            script.train()
        expected = first.model.state_dict()
        for name, value in second.model.state_dict().items():
            torch.testing.assert_close(value, expected[f"_module.{name}"], rtol=0, atol=1e-6, msg=name)

    def test_the_order_of_the_optimizer_s_state(self, layer: Any, tmp_path: Path) -> None:
        """`fix` makes layers whose parameters have the order of torch.nn; without a bias it is the same."""
        first = self.prepared(opacus.PrivacyEngine, layer, 0).train()
        first.save(tmp_path / "point")
        second = Script(PrivacyEngine(accountant="rdp"), fix(Reads(layer())), backend="eager")
        if not any("bias" in name for name, _ in second.model.layer.named_parameters()):
            second.load(tmp_path / "point").train()
            return
        sentence = r"the state has momentum_buffer of shape \[\d+\] for a parameter of shape \[\d+, 4\](?s:.*)fix=True"
        with pytest.raises(OptionError, match=sentence):
            second.load(tmp_path / "point")
        assert not any("momentum_buffer" in one for one in second.optimizer.state.values())

    def test_old_names_alone(self, layer: Any) -> None:
        state = self.prepared(opacus.PrivacyEngine, layer, 0).model.state_dict()
        inner = {name: value for name, value in state.items() if name.startswith("_module.layer.l") or "last" in name}
        script = self.prepared(PrivacyEngine, layer, 7, fix=True, backend="eager")
        assert not any(script.model.load_state_dict(inner))
        assert all(value.equal(state[f"_module.{name}"]) for name, value in script.model.state_dict().items())

    def test_two_values_of_one_parameter(self, layer: Any) -> None:
        state = self.prepared(opacus.PrivacyEngine, layer, 0).model.state_dict()
        state["_module.layer.l0.ih.weight"] = state["_module.layer.l0.ih.weight"] + 1
        script = self.prepared(PrivacyEngine, layer, 7, fix=True, backend="eager")
        sentence = r"two values for 'layer.weight_ih_l0'.*'layer.l0.ih.weight'(?s:.*)Delete one of the two"
        with pytest.raises(OptionError, match=sentence):
            script.model.load_state_dict(state)

    def test_a_model_that_keeps_the_layer(self, layer: Any) -> None:
        state = self.prepared(opacus.PrivacyEngine, layer, 0).model.state_dict()
        script = self.prepared(PrivacyEngine, layer, 7, backend="eager")
        assert not any(script.model.load_state_dict(state))
        assert all(value.equal(state[f"_module.{name}"]) for name, value in script.model.state_dict().items())


def test_attention_of_opacus_is_refused() -> None:
    """Its three matrices are one of nn.MultiheadAttention, unless the batch comes first: another function then."""
    state = nn.Sequential(DPMultiheadAttention(4, 2)).state_dict()
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    sentence = r"'0.qlinear.weight' of Opacus's DPMultiheadAttention, and the model has nn.MultiheadAtt.*\n  Load it"
    with pytest.raises(OptionError, match=sentence):
        unwrapped(model, {f"_module.{name}": value for name, value in state.items()})
    own = nn.Sequential(DPMultiheadAttention(4, 2))
    assert unwrapped(own, state) is state
