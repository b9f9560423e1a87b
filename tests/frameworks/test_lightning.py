"""Lightning: the net inside of a LightningModule, or the module itself, and which calls have per-sample gradients."""

from __future__ import annotations

import copy
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
from fxgrad.errors import UnclippedGrad
from tests.frameworks.loop import clipped_sum, loop_rows

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
B, STEPS, C, LR = 4, 2, 0.3, 0.1


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(STEPS * B, 4, generator=generator), torch.randint(3, (STEPS * B,), generator=generator)
    return TensorDataset(x, y)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A module whose training_step calls itself."""

    def __init__(self, transformed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.net = fxgrad.transform(net, quantity=fxgrad.ClippedGrad(C), backend="eager") if transformed else net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class CallsTheNet(Module):
    """A module whose training_step calls what is inside of it."""

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


def whole(module: Module) -> Any:
    return fxgrad.transform(module, quantity=fxgrad.ClippedGrad(C), backend="eager")


def fit(module: Any, folder: Path, checkpoint: str | None = None, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        trainer.fit(module, DataLoader(data(), batch_size=B), ckpt_path=checkpoint)
    return trainer


def expected(epochs: int = 1) -> dict[str, Tensor]:
    """The parameters behind steps along clipped sums, by the loop over single samples in float64."""
    net = copy.deepcopy(Module().net).double()
    x, y = data().tensors
    for start in [*range(0, STEPS * B, B)] * epochs:
        total = clipped_sum(loop_rows(net, x[start : start + B].double(), y[start : start + B]), C)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.sub_(LR * total[name])
    return {name: p.detach().float() for name, p in net.named_parameters()}


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("form", ["the net", "the net, called", "the module"])
def test_equals_the_loop(form: str, tmp_path: Path) -> None:
    module = {
        "the net": lambda: Module(transformed=True),
        "the net, called": lambda: CallsTheNet(transformed=True),
        "the module": lambda: whole(Module()),
    }[form]()
    fit(module, tmp_path)
    torch.testing.assert_close(parameters(module.net), expected(), atol=1e-6, rtol=1e-5)


def test_a_transformed_module_that_calls_what_is_inside(tmp_path: Path) -> None:
    """Nothing would clip: that call knows no samples."""
    module = CallsTheNet()
    start = copy.deepcopy(parameters(module.net))
    with pytest.raises(UnclippedGrad, match="not clipped") as caught:
        fit(whole(module), tmp_path)
    assert "submodule" in caught.value.advice
    torch.testing.assert_close(parameters(module.net), start, atol=0, rtol=0)


@pytest.mark.parametrize("form", ["the net", "the module"])
def test_checkpoints(form: str, tmp_path: Path) -> None:
    def made() -> Any:
        return Module(transformed=True) if form == "the net" else whole(Module())

    trainer = fit(made(), tmp_path, enable_checkpointing=True)
    path = trainer.checkpoint_callback.best_model_path
    names = torch.load(path, weights_only=False)["state_dict"].keys()
    assert names == Module().state_dict().keys()  # the plain module's: other programs can load them
    resumed = made()
    fit(resumed, tmp_path, checkpoint=path, max_epochs=2)
    torch.testing.assert_close(parameters(resumed.net), expected(epochs=2), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["the net", "the module"])
def test_bfloat16(form: str, tmp_path: Path) -> None:
    module = Module(transformed=True) if form == "the net" else whole(Module())
    fit(module, tmp_path, precision="bf16-mixed")
    found = parameters(module.net)
    assert all(p.dtype is torch.float32 for p in found.values())
    for name, p in expected().items():
        assert (found[name] - p).abs().max() < 0.02 * LR
    assert any(not torch.allclose(found[name], p, atol=1e-7) for name, p in expected().items())  # it is bfloat16
