"""The Trainer and Lightning divide a batch's loss by the number of batches for one step: norms would be too small."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Trainer, TrainingArguments

import fxgrad
from fxgrad.errors import OptionError
from tests.frameworks.loop import clipped_sum, loop_rows

B, STEPS, C = 4, 3, 0.5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(STEPS * B, 4), torch.randint(3, (STEPS * B,)))


def expected() -> dict[str, Tensor]:
    """The parameters behind one step of SGD along the clipped sum of all samples."""
    start = net()
    x, y = data().tensors
    total = clipped_sum(loop_rows(start, x, y), C)
    return {name: p.detach().double() - 0.1 * total[name] for name, p in start.named_parameters()}


def check(model: nn.Module) -> None:
    found = {name: p.detach().double() for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected(), atol=1e-6, rtol=1e-5)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The net inside of a LightningModule."""

    def __init__(self, model: nn.Module, multiplied: bool) -> None:
        super().__init__()
        self.net, self.multiplied = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager"), multiplied

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")
        return loss * self.trainer.accumulate_grad_batches if self.multiplied else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def fit(module: lightning.LightningModule, folder: Path) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        trainer.fit(module, DataLoader(data(), batch_size=B))


def test_lightning(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(OptionError, match=f"Lightning divided the loss by {STEPS} for gradient accumulation"):
        fit(Module(model, multiplied=False), tmp_path)
    assert all(p.grad is None for p in model.parameters())
    fit(Module(model, multiplied=True), tmp_path)
    check(model)


class Rows(Dataset[dict[str, Tensor]]):
    """The samples by the names of the Trainer's arguments."""

    def __len__(self) -> int:
        return STEPS * B

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x, y = data()[i]
        return {"x": x, "labels": y}


class Classifier(nn.Module):
    """A model that knows its loss, as Hugging Face's do, and takes none of the Trainer's arguments for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels, reduction="sum")}
        return {**loss, "logits": logits}


def summed(outputs: dict[str, Tensor], labels: Tensor, **_: Any) -> Tensor:
    """The Trainer's `compute_loss_func`."""
    return F.cross_entropy(outputs["logits"], labels, reduction="sum")


def train(model: nn.Module, folder: Path, **options: Any) -> None:
    clipped = fxgrad.ClippedGrad(C)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=B,
        gradient_accumulation_steps=STEPS,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(
        model=fxgrad.transform(Classifier(model), quantity=clipped, backend="eager"),
        args=arguments,
        train_dataset=Rows(),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        **options,
    ).train()


def test_the_trainer(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(OptionError, match=f"The Trainer divided the loss by {STEPS} for gradient accumulation"):
        train(model, tmp_path)
    assert all(p.grad is None for p in model.parameters())
    train(model, tmp_path, compute_loss_func=summed)
    check(model)
