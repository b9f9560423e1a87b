"""timm's families against the loop over single samples, and with dropout against full batches under one seed."""

from __future__ import annotations

import opacus
import pytest
import torch
from timm.layers import BatchNormAct2d, GroupNormAct
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
import fxgrad.opacus
from fxgrad.testing import assert_per_sample_grads
from tests.examples import load
from tests.zoo.models import TOLERANCE
from tests.zoo.timm_models import create, timm_family

# PyTorch's own backward of batch_norm in eval mode is wrong for a batch of one whose gradient has the channels last
# (on CPU, torch 2.13), so the truth about xcit are forwards of the whole batch.
WITHOUT_BATCHES_OF_ONE = {"xcit"}


# The first two are below with dropout; the others have sisters with the same layers.
@pytest.mark.parametrize("name", timm_family.without("beit", "cait", "beit_shared", "poolformer_v2"))
def test_equals_the_loop(name: str) -> None:
    """In one graph: fxgrad.transform refuses a graph break."""
    model, inputs = timm_family.build(name)
    seed = 0 if name in WITHOUT_BATCHES_OF_ONE else None
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=TOLERANCE, seed=seed)


@pytest.mark.parametrize("name", timm_family.but_long("beit", "cait"))
def test_with_dropout(name: str) -> None:
    model, inputs = timm_family.build(name, dropout=0.2)
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=TOLERANCE, seed=1)


def test_batch_norm_in_training_mode_is_refused() -> None:
    model, inputs = create("xcit_nano_12_p16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=5)
    with pytest.raises(fxgrad.errors.MixedSamples, match=r"batch_norm in training mode .*\n.*xcit\.py"):
        fxgrad.transform(model, backend="eager")(inputs["x"])


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.parametrize("name", ["efficientnet_b0", "regnetx_002"])
def test_batch_norms_with_an_activation_become_group_norms(name: str) -> None:
    """As fxgrad.opacus.fix makes them of plain batch norms: the activations stay, and so do the Parameter objects."""
    torch.manual_seed(0)
    model, _ = create(name, num_classes=3)
    activations = [layer.act for layer in model.modules() if isinstance(layer, BatchNormAct2d)]
    before = [*map(id, model.parameters())]
    fxgrad.opacus.make_private(
        opacus.PrivacyEngine(),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(4, 1)), 2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        fix=True,
        backend="eager",
    )
    norms = [layer for layer in model.modules() if isinstance(layer, GroupNormAct)]
    assert activations and [layer.act for layer in norms] == activations
    assert [*map(id, model.parameters())] == before
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    assert {32 % layer.num_groups for layer in norms} == {0}
    assert_per_sample_grads(model.double(), torch.randn(2, 3, 32, 32).double(), backend="eager", tolerance=TOLERANCE)


class Renamed(BatchNormAct2d):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("kind", [BatchNormAct2d, Renamed])
def test_activations_with_parameters_stay(kind: type[nn.Module]) -> None:
    norm = kind(8, act_layer=nn.PReLU)
    fixed = fxgrad.opacus.fix(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 3, 3)))
    new = fixed.get_submodule("1")
    assert type(new) is GroupNormAct and [*dict(new.named_parameters())] == ["weight", "bias", "act.weight"]


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """examples/vision_timm.py: a clipped sum beside a loop over images."""
    assert load("vision_timm").main("--steps 2 --batch 8 --backend eager".split()) == 0
    assert capsys.readouterr().out.endswith("good\n")


def test_another_sum_falls_short_in_the_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("vision_timm")
    loop = module.loop
    monkeypatch.setattr(module, "loop", lambda *batch: 1.01 * loop(*batch))
    assert module.main("--steps 1 --batch 4 --backend eager".split()) == 1
    assert capsys.readouterr().out.endswith("FELL SHORT\n")
