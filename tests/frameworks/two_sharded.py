"""One of two processes in which Accelerate or the Trainer uses FSDP2: `python -m tests.frameworks.two_sharded FOLDER`.

torchrun's variables are in the environment; FOLDER/RANK gets the names of the cases that passed. Accelerate makes
FSDP2 of processes with GPUs alone: on CPUs its state stays MULTI_CPU, and the plugin is ignored. Here the state says
FSDP; all else is Accelerate's own.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxgrad
import tests.import_torchvision  # noqa: F401  before transformers

WORLD, C, STEPS, B = 2, 0.8, 3, 4
CASES: dict[str, Callable[[], None]] = {}


def case(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = run
    return run


def fsdp_without_gpus() -> None:
    """Let Accelerate's state be that of processes with GPUs."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            assert self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    _no_split_modules = ["Block"]  # noqa: RUF012 - as transformers declares it

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data() -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    n = STEPS * WORLD * B
    x = torch.randn(n, 4, generator=seeded, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=seeded)


def clipped(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The clipped sum by the loop, divided as FSDP2 divides."""

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target, reduction="sum")

    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        loss(model(x[i : i + 1]), y[i : i + 1]).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] += p.grad * (C / (norm + 1e-6)).clamp(max=1)
    model.zero_grad()
    return {name: g / WORLD for name, g in total.items()}


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )


def equal(model: nn.Module, alone: nn.Module, tolerance: float = 1e-10) -> None:
    whole = {name.removeprefix("module."): p for name, p in model.state_dict().items()}
    for name, q in alone.named_parameters():
        p = whole[name]
        assert isinstance(p, DTensor), name
        error = float((p.full_tensor() - q).abs().max())
        assert error <= tolerance, (name, error)


def _accelerated(**options: Any) -> None:
    """Prepare a transformed model, and train with accumulation over two of the batches."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(**options))
    rank = accelerator.process_index
    model, alone = net(), net()
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    private, optimizer = accelerator.prepare(private, torch.optim.AdamW(private.parameters(), lr=0.01))
    other = torch.optim.AdamW(alone.parameters(), lr=0.01)
    x, y = data()
    for some_x, some_y in zip(x.split(WORLD * B), y.split(WORLD * B), strict=True):
        optimizer.zero_grad()
        mine_x, mine_y = some_x.chunk(WORLD)[rank], some_y.chunk(WORLD)[rank]
        halves = zip(mine_x.chunk(2), mine_y.chunk(2), strict=True)
        for i, (half_x, half_y) in enumerate(halves):
            accelerator.gradient_state._set_sync_gradients(i == 1)
            context = accelerator.no_sync(private) if i == 0 else torch.enable_grad()
            with context:
                accelerator.backward(F.cross_entropy(private(half_x), half_y, reduction="sum"))
        optimizer.step()
        for name, g in clipped(alone, some_x, some_y).items():
            alone.get_parameter(name).grad = g
        other.step()
    equal(private, alone)


@case
def accelerate_prepares_a_transformed_model() -> None:
    _accelerated()


@case
def accelerate_loads_on_the_main_process() -> None:
    _accelerated(cpu_ram_efficient_loading=True)


@case
def accelerate_checkpoints_activations() -> None:
    _accelerated(activation_checkpointing=True)


@case
def accelerate_then_make_private() -> None:
    """A private step without noise is one process's with the samples of both."""
    import opacus
    from torch.utils.data import DataLoader, TensorDataset

    import fxgrad.opacus

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    rank = accelerator.process_index
    alone = net()
    model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(net()))
    x, y = data()
    private, stepped, _ = fxgrad.opacus.make_private(
        opacus.PrivacyEngine(accountant="rdp"),
        module=model,
        optimizer=optimizer.optimizer,
        data_loader=DataLoader(TensorDataset(x, y), WORLD * B),
        noise_multiplier=0.0,
        max_grad_norm=C,
        loss_reduction="sum",
        one_backward=True,
        check_first_batch=False,
        backend="eager",
    )
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    for some_x, some_y in zip(x.split(WORLD * B), y.split(WORLD * B), strict=True):
        stepped.zero_grad()
        mine = some_x.chunk(WORLD)[rank], some_y.chunk(WORLD)[rank]
        accelerator.backward(F.cross_entropy(private(mine[0]), mine[1], reduction="sum"))
        stepped.step()
        for name, g in clipped(alone, some_x, some_y).items():
            alone.get_parameter(name).grad = g * WORLD
        other.step()
    equal(private, alone)


class Labelled(nn.Module):
    """A model as the Trainer calls it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


@case
def the_trainer_shards_a_transformed_model() -> None:
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    alone = net()
    private = fxgrad.transform(Labelled(net()), quantity=fxgrad.ClippedGrad(C), backend="eager")
    x, y = data()
    samples: Any = [{"x": x[i], "labels": y[i]} for i in range(len(x))]

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs["logits"], labels, reduction="sum")

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=private,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=B,
                max_grad_norm=0.0,
                use_cpu=True,
                fsdp=True,
                fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Block"]},
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                train_sampling_strategy="sequential",
                lr_scheduler_type="constant",
                label_names=["labels"],
                average_tokens_across_devices=False,  # it multiplies the loss by the number of processes
                learning_rate=0.1,
                optim="sgd",
            ),
            train_dataset=samples,
            compute_loss_func=loss,
        )
        trainer.train()
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    for some_x, some_y in zip(x.split(WORLD * B), y.split(WORLD * B), strict=True):
        for name, g in clipped(alone, some_x, some_y).items():
            alone.get_parameter(name).grad = g
        other.step()
    equal(private, Labelled(alone))


@case
def accelerate_ignores_the_plugin_without_gpus() -> None:
    """Why the state is changed here; the page on several devices says it."""
    AcceleratorState.__init__ = ORIGINAL
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    model = net()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(prepared) is nn.parallel.DistributedDataParallel


ORIGINAL = AcceleratorState.__init__

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fsdp_without_gpus()
    passed = Path(sys.argv[1], os.environ["RANK"])  # a file for each process: lines on one stdout are mixed
    for name, run in CASES.items():
        run()
        with passed.open("a") as file:
            print(name, file=file)
    dist.destroy_process_group()
