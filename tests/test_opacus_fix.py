"""Layers that Opacus refuses, and Opacus's own, are replaced; the optimizer steps the parameters of the fixed model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad.opacus
from fxgrad.errors import OptionError
from fxgrad.opacus import PrivacyEngine, fix
from tests.opacus_settings import WARNINGS

ALONE = "GroupNorm takes the place of BatchNorm1d .*one channel in each group"
pytestmark = [*WARNINGS, pytest.mark.filterwarnings(f"ignore:{ALONE}")]


def normed(norm: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    first, last = nn.Conv1d(3, 4, 2), nn.Linear(4, 2)
    norm = nn.BatchNorm1d(4) if norm is None else norm
    return nn.Sequential(first, norm, nn.Tanh(), nn.Flatten(0, 0), nn.AdaptiveAvgPool1d(1), nn.Flatten(), last).double()


def loader() -> DataLoader[Any]:
    x = torch.randn(16, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum((1, 2)) > 0).long()), batch_size=4)


def prepare(engine: Any, model: nn.Module, **arguments: Any) -> Any:
    arguments.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    numbers = dict[str, Any](noise_multiplier=0.0, max_grad_norm=0.1, poisson_sampling=False)
    return engine.make_private(module=model, data_loader=loader(), **numbers | arguments)


def make(model: nn.Module, **arguments: Any) -> Any:
    return prepare(PrivacyEngine(accountant="rdp"), model, **dict(fix=True, backend="eager") | arguments)


def train(made: Any) -> nn.Module:
    model: nn.Module
    model, optimizer, batches = made[0], made[1], made[-1]
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "without parameters": lambda: nn.BatchNorm1d(4, affine=False),
}


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_parameters_are_those_of_opacus_after_its_fix(norm: Any, mode: str) -> None:
    model = normed(norm())
    for p in model[1].parameters():
        nn.init.normal_(p)  # of another training
    theirs = ModuleValidator.fix(copy.deepcopy(model)).double()
    if not [*model[1].parameters()]:
        theirs[1] = nn.GroupNorm(4, 4, affine=False)  # Opacus looks at trainable layers alone
    before = [*model.parameters()]
    made = make(model, grad_sample_mode=mode)
    assert [*map(id, model.parameters())] == [*map(id, before)]
    assert made[0]._module is model and type(model[1]) is type(theirs[1])
    ours = train(made).state_dict()
    reference = train(prepare(opacus.PrivacyEngine(accountant="rdp"), theirs)).state_dict()
    for name in dict(model.named_parameters()):
        torch.testing.assert_close(ours[name], reference[f"_module.{name}"], rtol=0, atol=1e-9, msg=name)
    if model[1].weight is not None:
        assert (model[1].weight - theirs[1].weight).abs().max() < 1e-9
        assert (model[1].weight - dict(fix(normed(norm())).named_parameters())["1.weight"]).abs().max() > 1e-4


def test_instance_norm_tracks_nothing_and_keeps_its_values() -> None:
    """Opacus itself cannot train what its fixer makes: it has buffers."""
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    nn.init.normal_(norm.weight)
    weight, before = norm.weight, norm.weight.detach().clone()
    model = normed(norm)
    made = make(model)
    assert model[1] is not norm and not model[1].track_running_stats
    assert model[1].weight is weight and weight.equal(before.double())
    train(made)
    assert not weight.equal(before.double())


def test_a_budget_takes_it() -> None:
    model = normed()
    made = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader(),
        target_epsilon=5.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
        epsilon_tolerance=1.0,
        fix=True,
        backend="eager",
    )
    assert isinstance(made[0][1], nn.GroupNorm)


def test_without_it_the_error_says_how() -> None:
    advice = r"(?s)BatchNorm1d '1'.*Pass fix=True .*fxgrad\.opacus\.fix\(model\) .*ModuleValidator\.fix"
    with pytest.raises(UnsupportedModuleError, match=advice):
        make(normed(), fix=False)
    with pytest.raises(UnsupportedModuleError) as raised:
        fxgrad.opacus.validate(normed().eval())
    assert "fix=True" not in str(raised.value)


def test_what_is_right_stays_as_it_is() -> None:
    model = normed(nn.BatchNorm1d(4).eval())
    norm = model[1]
    model.train()
    norm.eval()
    make(model)
    assert model[1] is norm


class Named(nn.BatchNorm1d):
    """Computes what its base class does."""


class Activated(nn.BatchNorm1d):
    """Computes something more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Scaled(nn.BatchNorm1d):
    """Inherits its forward, and has a parameter that another layer may read."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.scale = nn.Parameter(torch.ones(features))


class Lone(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        pass


def test_subclasses_that_compute_the_same() -> None:
    model, expected = normed(Named(4)), fix(normed())
    with pytest.raises(UnsupportedModuleError, match=r"(?s)Named '1'.*Pass fix=True"):
        fxgrad.opacus.validate(model)
    weight = model[1].weight
    train(make(model))
    assert type(model[1]) is nn.GroupNorm and model[1].weight is weight
    assert model[1].num_groups == expected[1].num_groups  # type: ignore[index]


@pytest.mark.parametrize("kind", [Activated, Scaled, Lone])
def test_subclasses_that_no_fixer_knows(kind: Any) -> None:
    model = normed(kind(4))
    norm, parameters = model[1], [*model.parameters()]
    with pytest.raises(UnsupportedModuleError, match=rf"(?s){kind.__name__} '1'.*Put another layer in its place"):
        make(model, fix=False)
    for run in (lambda: fix(model), lambda: make(model)):
        with pytest.raises(OptionError, match=f"no fixer knows <class '.*{kind.__name__}'>") as caught:
            run()
        assert "call its eval()" in caught.value.advice
    assert model[1] is norm and [*map(id, model.parameters())] == [*map(id, parameters)]
    norm.eval()
    fxgrad.opacus.validate(model)
    assert type(fix(model)[1]) is kind  # type: ignore[index]


def test_frozen_parameters_stay_frozen() -> None:
    model = normed(nn.BatchNorm1d(4).requires_grad_(False))
    assert not any(p.requires_grad for p in fix(model)[1].parameters())  # type: ignore[index]
    made = make(model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    train(made)
    assert model[1].weight.eq(1).all()


FIRST = r"\n  .*model = fxgrad\.opacus\.fix\(model\), and make the optimizer"


class TestRefusals:
    """The model stays as it was."""

    def test_an_optimizer_that_has_stepped(self) -> None:
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model(torch.randn(4, 3, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        with pytest.raises(OptionError, match="has stepped parameters of a BatchNorm1d, which fix=True.*" + FIRST):
            make(model, optimizer=optimizer)
        assert isinstance(model[1], nn.BatchNorm1d)

    def test_a_model_that_is_one_layer(self) -> None:
        with pytest.raises(OptionError, match="the model itself is a BatchNorm1d" + FIRST):
            make(nn.BatchNorm1d(3).double())

    def test_a_model_that_is_transformed(self) -> None:
        model = normed()
        with pytest.raises(OptionError, match="the model is transformed" + FIRST):
            make(fxgrad.transform(model, loss_reduction="mean"))
        assert isinstance(model[1], nn.BatchNorm1d)

    def test_a_parameter_that_another_layer_has(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)).double()
        model[1].weight = model[0].weight
        with pytest.raises(OptionError, match=r"shares a parameter with another layer.*\n  Replace it yourself"):
            make(model)

    def test_parameters_that_the_new_layer_does_not_have(self) -> None:
        model = Attends(DPMultiheadAttention(4, 2)).double()
        with pytest.raises(OptionError, match="MultiheadAttention has other parameters than DPMultiheadA.*" + FIRST):
            make(model)
        assert isinstance(model.layer, DPMultiheadAttention)

    def test_a_model_that_is_wrapped(self, tmp_path: Any) -> None:
        torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(normed())
            with pytest.raises(OptionError, match=r"DistributedDataParallel has taken note.*\n  Do it before"):
                make(wrapped)
        finally:
            torch.distributed.destroy_process_group()


class Attends(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(*inputs)[0]
        return out


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "rnn": lambda: DPRNN(3, 4),
    "relu": lambda: DPRNN(3, 4, num_layers=2, nonlinearity="relu", batch_first=True),
    "lstm": lambda: DPLSTM(3, 4, bias=False),
    "lstm, two layers": lambda: DPLSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5).eval(),
    "gru": lambda: DPGRU(3, 4, bidirectional=True),
}


@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_of_opacus(layer: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    old = nn.Sequential(layer()).double()
    new: Any = fix(old)
    assert type(new[0]) is getattr(nn, type(old[0]).__name__[2:]) and new[0].training == old[0].training
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    expected, found = old(x), new(x)
    for one, other in zip(flat(expected), flat(found), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    packed = nn.utils.rnn.pack_sequence([x[0], x[1, :2]], enforce_sorted=False)
    torch.testing.assert_close(old(packed)[0].data, new(packed)[0].data, rtol=0, atol=1e-6)
    assert all(value.equal(new[0].state_dict()[name]) for name, value in old[0].state_dict().items())


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [tensor for part in outputs for tensor in flat(part)]


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "without bias": dict(bias=False),
    "of other sizes": dict(kdim=3, vdim=5),
    "further keys": dict(add_bias_kv=True, add_zero_attn=True),
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_opacus(options: dict[str, Any], masked: bool) -> None:
    torch.manual_seed(0)
    old = DPMultiheadAttention(4, 2, dropout=0.5, **options).double().eval().requires_grad_(False)
    for p in old.parameters():
        nn.init.normal_(p)
    new = fix(old)
    assert type(new) is nn.MultiheadAttention and not new.training and new.dropout == 0.5
    assert not any(p.requires_grad for p in new.parameters())
    q, k, v = (torch.randn(6, 5, size, dtype=torch.float64) for size in (4, old.kdim, old.vdim))
    masks: dict[str, Any] = {}
    if masked:
        masks["attn_mask"] = torch.ones(6, 6, dtype=torch.bool).triu(1)
        masks["key_padding_mask"] = torch.arange(6) >= torch.tensor([6, 5, 4, 3, 6])[:, None]
    for one, other in zip(old(q, k, v, **masks), new(q, k, v, **masks), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_attention_that_computes_something_else_stays() -> None:
    """With the batch first, Opacus's own is another function."""
    assert isinstance(fix(DPMultiheadAttention(4, 2, batch_first=True)), DPMultiheadAttention)


class Reads(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(x.transpose(1, 2))[0].mean(1))
        return out


@pytest.mark.parametrize("fixed", [False, True])
def test_a_script_with_a_layer_of_opacus_trains(fixed: bool) -> None:
    """With fix=True the optimizer goes on with the parameters that it has."""
    torch.manual_seed(0)
    model = Reads(DPLSTM(3, 4, batch_first=True)).double()
    theirs = copy.deepcopy(model)
    train(make(model, fix=fixed))
    train(prepare(opacus.PrivacyEngine(accountant="rdp"), theirs))
    assert isinstance(model.layer, nn.LSTM if fixed else DPLSTM)
    for name, p in dict(theirs.named_parameters()).items():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=0, atol=1e-6, msg=name)


def test_a_norm_of_one_number_is_warned_of() -> None:
    """Of inputs [B, C], a group norm with one channel in each group returns its shift."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match=ALONE.replace("BatchNorm1d ", "BatchNorm1d '1'") + r".*nn\.LayerNorm\(4\)"):
        fixed = fix(model)
    out = fixed(torch.randn(5, 3))
    assert (out - out[:1]).abs().max() < 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fix(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(64)))
