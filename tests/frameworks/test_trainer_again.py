"""Hugging Face's Trainer trains privately again: after an error, after a stop, and from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import fxgrad.opacus
from fxgrad.errors import OptionError, UnaccountedGrad
from tests.frameworks.test_private_trainer import DELTA, STEPS, B, Private, Rows, by_hand, has_four_parts, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning"),
]
PARTS = 3


class Broken(Exception):
    """Of the user's own code."""


class Fails(Private):
    """A loss that raises once."""

    fails_at = 5

    def loss(self, outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        if len(self.batches) == self.fails_at:
            self.fails_at = -1
            raise Broken("mine")
        return super().loss(outputs, labels)


class Stops(TrainerCallback):  # type: ignore[misc]
    """It ends the training behind the second part of the second batch, once."""

    parts = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.parts += 1
        if self.parts == 4:
            control.should_training_stop = control.should_epoch_stop = True


class Spoils(TrainerCallback):  # type: ignore[misc]
    """It changes p.grad of the second step, once."""

    spoiled = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1 and not self.spoiled:
            self.spoiled = True
            next(model.parameters()).grad.mul_(0.5)


@pytest.mark.parametrize(
    "kind, callback, error, match",
    [
        (Fails, None, Broken, "mine"),
        (Private, Stops, None, ""),
        (Private, Spoils, UnaccountedGrad, "is not what the last backward"),
    ],
)
def test_again_after_an_end_between_parts(kind: Any, callback: Any, error: Any, match: str, tmp_path: Path) -> None:
    private = kind()
    options: dict[str, Any] = {"gradient_accumulation_steps": PARTS}
    trainer = trainer_of(private, tmp_path, callbacks=[callback()] if callback else [], **options)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(error, match=match):
            trainer.train()
    assert private.engine.accountant.history == [(0.0, B / len(Rows()), 1)]
    assert vars(private.plain.net[2].bias)["summed_grad"].any()  # of the parts that were not released
    private.plain.load_state_dict(Private().plain.state_dict())
    private.batches.clear()
    trainer.train()
    starts = range(0, len(private.batches), PARTS)
    steps = [[place for part in private.batches[i : i + PARTS] for place in part] for i in starts]
    assert len(steps) == STEPS
    torch.testing.assert_close(private.parameters(), by_hand(steps), atol=1e-6, rtol=1e-5)
    assert private.engine.accountant.history == [(0.0, B / len(Rows()), 1 + STEPS)]


def weight_of(private: Private) -> Any:
    return private.plain.net[2].weight


def test_a_resumed_training_draws_noise_of_its_own(tmp_path: Path) -> None:
    noise = 1000.0
    released: list[Tensor] = []

    def script(steps: int, **options: Any) -> None:
        """The same in each process."""
        private = Private(
            noise=noise,
            noise_generator=torch.Generator().manual_seed(7),
            generator=torch.Generator().manual_seed(8),
        )
        trainer = trainer_of(private, tmp_path, max_steps=steps, save_strategy="steps", save_steps=3)
        private.optimizer.attach_step_hook(lambda _: released.append(weight_of(private).grad.clone()))
        private.optimizer.attach_step_hook(lambda _: batches.append(private.batches[-1]))
        trainer.train(**options)

    batches: list[list[int]] = []
    script(3)
    script(6, resume_from_checkpoint=True)
    assert len(released) == 6
    spread = released[0].std()
    for i in range(3):
        for j in range(3, 6):
            assert (released[i] - released[j]).std() > 0.5 * spread
    assert batches[:3] != batches[3:]


def test_another_engine_or_loader(tmp_path: Path) -> None:
    private = Private()
    given = DataLoader(Rows(), B, shuffle=True)
    callbacks = {
        "engine does not count the optimizer's steps": (PrivacyEngine(accountant="rdp"), private.loader),
        "loader is not the one that make_private returned": (private.engine, given),
        "loader is not the one that make_private ret": (private.engine, Private().loader),
    }
    for sentence, (engine, loader) in callbacks.items():
        trainer = trainer_of(private, tmp_path, attach=False, train_dataset=Rows())
        with pytest.raises(OptionError, match=sentence) as caught:
            fxgrad.opacus.TrainerCallback(engine, loader, delta=DELTA).attach(trainer)
        has_four_parts(caught.value)
    fxgrad.opacus.TrainerCallback(private.engine, private.loader, delta=DELTA).attach(trainer)
