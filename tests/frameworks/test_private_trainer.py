"""`fxgrad.opacus.TrainerCallback`: Hugging Face's Trainer takes the private steps of a plain loop."""

from __future__ import annotations

import doctest
import inspect
import os
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

import fxgrad.opacus
from fxgrad.errors import OptionError
from tests.frameworks.loop import loop_rows, norms_of
from tests.quick import long_but

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning"),
]
ROWS, B, C, DELTA, LR = 24, 4, 0.3, 1e-3, 0.5
STEPS = ROWS // B  # of an epoch


class Rows(Dataset[dict[str, Tensor]]):
    """Samples by the names of the model's arguments; a label is 3 * the row's place + the class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, 4, generator=generator)
        self.y = torch.randint(3, (ROWS,), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": 3 * i + self.y[i]}


class Classifier(nn.Module):
    """A model as Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels % 3), "logits": logits}


class Private:
    """A private model with what trains it."""

    def __init__(self, noise: float = 0.0, poisson: bool = True, accountant: str = "rdp", **options: Any) -> None:
        self.plain, self.engine = Classifier(), PrivacyEngine(accountant=accountant)
        self.batches: list[list[int]] = []
        self.model, self.optimizer, self.loader = fxgrad.opacus.make_private(
            self.engine,
            module=self.plain,
            optimizer=torch.optim.SGD(self.plain.parameters(), lr=LR),
            data_loader=DataLoader(Rows(), B, generator=options.pop("generator", None)),
            noise_multiplier=noise,
            max_grad_norm=C,
            poisson_sampling=poisson,
            backend="eager",
            **{"one_backward": True, **options},
        )

    def loss(self, outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        self.batches.append((labels // 3).tolist())
        return F.cross_entropy(outputs["logits"], labels % 3)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.plain.named_parameters()}


def trainer_of(private: Private, folder: Path, attach: bool = True, **options: Any) -> Trainer:
    own = {"compute_loss_func", "optimizers", "model", "callbacks", "eval_dataset", "train_dataset"} & options.keys()
    arguments = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        **{name: value for name, value in options.items() if name not in own},
    }
    trainer = Trainer(
        args=TrainingArguments(**arguments),
        **{
            "model": private.model,
            "compute_loss_func": private.loss,
            "optimizers": (private.optimizer, None),
            **{name: options[name] for name in own},
        },
    )
    if attach:
        fxgrad.opacus.TrainerCallback(private.engine, private.loader, delta=DELTA).attach(trainer)
    return trainer


def by_hand(steps: list[list[int]]) -> dict[str, Tensor]:
    """The parameters behind DP-SGD's steps without noise, by the loop over single samples in float64."""
    model, rows = Classifier().double(), Rows()
    for places in steps:
        if places:
            grads = loop_rows(model.net, rows.x[places].double(), rows.y[places])
            weights = (C / (norms_of(grads) + 1e-6)).clamp(max=1)
            with torch.no_grad():
                for name, p in model.net.named_parameters():
                    p.sub_(LR / B * torch.einsum("n,n...->...", weights, grads[name]))
    return {name: p.detach().float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("one_backward", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_equals_the_loop_over_samples(parts: int, one_backward: bool, tmp_path: Path) -> None:
    private = Private(one_backward=one_backward)
    trainer_of(private, tmp_path, gradient_accumulation_steps=parts).train()
    assert len(private.batches) == STEPS * parts
    assert any(not batch for batch in private.batches) or parts == 1
    starts = range(0, len(private.batches), parts)
    steps = [[place for part in private.batches[i : i + parts] for place in part] for i in starts]
    assert len({len(step) for step in steps}) > 1  # Poisson's
    torch.testing.assert_close(private.parameters(), by_hand(steps), atol=1e-6, rtol=1e-5)
    assert private.engine.accountant.history == [(0.0, B / ROWS, STEPS)]


def test_other_loaders_batches_add_up(tmp_path: Path) -> None:
    """Without Poisson sampling a step has several batches, and the accountant counts them."""
    private = Private(poisson=False)
    trainer_of(private, tmp_path, gradient_accumulation_steps=2).train()
    batches = private.batches
    assert [len(batch) for batch in batches] == [B] * STEPS
    steps = [batches[i] + batches[i + 1] for i in range(0, STEPS, 2)]
    plain = Private(poisson=False)
    for step in steps:
        for half in step[:B], step[B:]:
            rows = Rows()
            plain.loss(plain.model(x=rows.x[half]), rows.y[half]).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    torch.testing.assert_close(private.parameters(), plain.parameters())
    assert private.engine.accountant.history == plain.engine.accountant.history


def test_noise_and_epsilon_of_a_plain_loop(tmp_path: Path) -> None:
    def private() -> Private:
        return Private(noise=1.0, generator=seeded(3), noise_generator=seeded(4))

    def seeded(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    one, other = private(), private()
    trainer = trainer_of(one, tmp_path, num_train_epochs=2)
    trainer.train()
    for _ in range(2):
        for inputs in other.loader:
            labels = inputs.pop("labels")
            other.optimizer.zero_grad()
            other.loss(other.model(**inputs), labels).backward()
            other.optimizer.step()
    assert one.batches == other.batches
    torch.testing.assert_close(one.parameters(), other.parameters(), atol=0, rtol=0)
    epsilon = other.engine.get_epsilon(delta=DELTA)
    assert one.engine.get_epsilon(delta=DELTA) == epsilon > 0
    logged = [entry["epsilon"] for entry in trainer.state.log_history]
    assert not any("grad_norm" in entry for entry in trainer.state.log_history)  # without noise
    assert logged == sorted(logged) and logged[-1] == epsilon and len(set(logged)) == 2 * STEPS


def test_reports_have_the_epsilon(tmp_path: Path) -> None:
    class Report(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
            seen.append(logs["epsilon"])

    seen: list[float] = []
    private = Private(noise=1.0)
    trainer = trainer_of(private, tmp_path, callbacks=[Report()])
    trainer.train()
    assert seen == [entry["epsilon"] for entry in trainer.state.log_history]


@pytest.mark.parametrize("stop", long_but(lambda stop: stop == STEPS, [STEPS, STEPS + 2]))
def test_resumes_from_a_checkpoint(stop: int, tmp_path: Path) -> None:
    """At an epoch's end the Trainer restores its random numbers, and the steps are those of an unbroken training."""
    whole, first, second = (Private(noise=1.0) for _ in range(3))
    saved: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": stop}
    trainer_of(whole, tmp_path / "whole", **saved).train()
    trainer_of(first, tmp_path / "broken", **saved, max_steps=stop).train()
    assert first.engine.accountant.history == [(1.0, B / ROWS, stop)]
    trainer = trainer_of(second, tmp_path / "broken", **saved)
    set_seed(99)
    trainer.train(resume_from_checkpoint=True)
    assert second.engine.accountant.history == [(1.0, B / ROWS, 2 * STEPS)] == whole.engine.accountant.history
    assert second.engine.get_epsilon(delta=DELTA) == trainer.state.log_history[-1]["epsilon"]
    if stop == STEPS:
        torch.testing.assert_close(second.parameters(), whole.parameters(), atol=0, rtol=0)


def test_an_accountant_keeps_the_steps_behind_the_checkpoint(tmp_path: Path) -> None:
    private = Private(noise=1.0)
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(private, tmp_path, **saved, max_steps=3).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    trainer_of(private, tmp_path, **saved).train(resume_from_checkpoint=checkpoint)
    assert private.engine.accountant.history == [(1.0, B / ROWS, 3 + STEPS - 2)]
    other = Private(noise=2.0)
    trainer_of(other, tmp_path / "other", max_steps=1).train()
    with pytest.raises(OptionError, match="counted other steps than the checkpoint's training") as caught:
        trainer_of(other, tmp_path, **saved).train(resume_from_checkpoint=checkpoint)
    has_four_parts(caught.value)


def test_adaptive_clipping_continues_its_bound(tmp_path: Path) -> None:
    bounds = {"target_unclipped_quantile": 0.2, "clipbound_learning_rate": 0.5, "max_clipbound": 10.0}
    adaptive: dict[str, Any] = {**bounds, "min_clipbound": 0.01, "unclipped_num_std": 2.0, "clipping": "adaptive"}
    first, second = (Private(noise=1.0, **adaptive) for _ in range(2))
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(first, tmp_path, **saved, max_steps=2).train()
    assert first.optimizer.max_grad_norm != C
    begun: list[float] = []

    class Report(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            begun.append(second.optimizer.max_grad_norm)

    trainer_of(second, tmp_path, callbacks=[Report()], **saved).train(resume_from_checkpoint=True)
    assert begun == [first.optimizer.max_grad_norm]


def test_evaluation_between_steps(tmp_path: Path) -> None:
    private = Private()
    trainer = trainer_of(private, tmp_path, eval_strategy="steps", eval_steps=2, eval_dataset=Rows())
    trainer.train()
    assert private.engine.accountant.history == [(0.0, B / ROWS, STEPS)]
    assert len([entry for entry in trainer.state.log_history if "eval_loss" in entry]) == STEPS // 2


# what would not be private


def has_four_parts(error: OptionError) -> None:
    assert all([error.sentence, error.where, error.path, error.advice])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "clipping of the sum": ({"max_grad_norm": 1.0}, "clips the gradient of the whole batch to 1.0"),
    "the model's own loss": ({"compute_loss_func": None}, "divide it by the number of tokens or labels"),
    "another optimizer": ({"optimizers": (None, None)}, "steps with NoneType, which adds no noise"),
    "another model": ({"model": Classifier()}, "Classifier is not the model that make_private returned"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once(name: str, tmp_path: Path) -> None:
    options, sentence = REFUSED[name]
    with pytest.raises(OptionError, match=sentence) as caught:
        trainer_of(Private(), tmp_path, **options)
    has_four_parts(caught.value)


def test_a_model_without_history_is_refused_behind_step_0(tmp_path: Path) -> None:
    private = Private()
    plain = Classifier()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    own: dict[str, Any] = {"model": plain, "compute_loss_func": None, "train_dataset": Rows()}
    sgd = torch.optim.SGD(plain.parameters(), lr=LR)
    trainer_of(private, tmp_path, False, optimizers=(sgd, None), **own, **options).train()
    with pytest.raises(OptionError, match="the checkpoint of step 2 has no accountant's history") as caught:
        trainer_of(private, tmp_path, **{**options, "max_steps": 4}).train(resume_from_checkpoint=True)
    has_four_parts(caught.value)


def test_clipping_from_the_middle_of_a_training(tmp_path: Path) -> None:
    class Change(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            args.max_grad_norm = 3.0

    private = Private()
    with pytest.raises(OptionError, match=r"clips the gradient of the whole batch to 3\.0"):
        trainer_of(private, tmp_path, callbacks=[Change()]).train()
    assert private.engine.accountant.history == [(0.0, B / ROWS, 1)]


def test_what_changes_behind_attach_is_refused_in_train(tmp_path: Path) -> None:
    private = Private()
    trainer = trainer_of(private, tmp_path)
    trainer.args.max_grad_norm = 2.0
    with pytest.raises(OptionError, match=r"clips the gradient of the whole batch to 2\.0"):
        trainer.train()
    trainer = trainer_of(private, tmp_path)
    trainer.get_train_dataloader = lambda: DataLoader(Rows(), B)
    with pytest.raises(OptionError, match="from another loader than make_private returned") as caught:
        trainer.train()
    has_four_parts(caught.value)
    trainer = trainer_of(private, tmp_path)
    trainer.optimizer = torch.optim.SGD(private.plain.parameters(), lr=LR)
    with pytest.raises(OptionError, match="steps with SGD, which adds no noise"):
        trainer.train()
    callback = fxgrad.opacus.TrainerCallback(private.engine, private.loader, delta=DELTA)
    trainer = trainer_of(private, tmp_path, False, callbacks=[callback], train_dataset=Rows())
    with pytest.raises(OptionError, match="TrainerCallback is not attached") as caught:
        trainer.train()
    has_four_parts(caught.value)
    assert not private.engine.accountant.history


def test_two_processes(tmp_path: Path) -> None:
    """The Trainer averages the gradients of both, independent or not."""
    root = Path(__file__).parents[2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(root)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.frameworks.two_trainers", str(tmp_path)],
            cwd=root,
            env={**os.environ, **torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()  # if one of them still waits for the other
    for each in said:
        assert each.count("2|the Trainer trains in 2 processes, and averages") == 2
        assert each.startswith("False|2|") and "\nTrue|2|" in each
        assert each.count("Start one process") == 2


def test_processes_that_start_behind_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = Private()
    trainer = trainer_of(private, tmp_path)
    monkeypatch.setattr("fxgrad.opacus.trainer_callback.processes", lambda: 2)
    with pytest.raises(OptionError, match="the Trainer trains in 2 processes, and averages") as caught:
        trainer.train()
    has_four_parts(caught.value)
    assert not private.engine.accountant.history


@pytest.mark.parametrize("delta", [0, 1.0, "1e-5", float("nan")])
def test_delta(delta: Any) -> None:
    private = Private()
    with pytest.raises(OptionError, match="delta has to be a number between 0 and 1, not"):
        fxgrad.opacus.TrainerCallback(private.engine, private.loader, delta=delta)


def test_the_example_of_the_docstring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the Trainer makes its folder here
    module = inspect.getmodule(fxgrad.opacus.TrainerCallback)
    with warnings.catch_warnings():
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 10 and not result.failed


def test_transformers_is_imported_when_asked_for() -> None:
    program = """
        import sys
        import fxgrad.opacus
        print("transformers" in sys.modules, "TrainerCallback" in fxgrad.opacus.__all__)
        sys.modules["transformers"] = None
        try:
            fxgrad.opacus.TrainerCallback
        except ImportError as error:
            print(type(error).__name__, error, sep="|")
        try:
            fxgrad.opacus.Trainer
        except AttributeError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("False True\nMissingPackage|fxgrad.opacus.TrainerCallback needs transformers, which is not")
    assert "module 'fxgrad.opacus' has no attribute 'Trainer'" in said
