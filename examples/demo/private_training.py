"""Train with a stated privacy, beside plain training: one function for both, and an engine's call for the privacy.

A network trained by DP-SGD (Abadi et al., Deep Learning with Differential Privacy, 2016,
https://arxiv.org/abs/1607.00133) reveals a limited amount about any one training image. In each step, every image's
gradient is cut to length C, and noise is added to their sum. The accountant bounds by ε what all steps together reveal.
fxgrad computes the clipped sum in one backward. Sampling, noise and accounting are Opacus's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import opacus
import torch
from claims import Claim
from digits import Digits, load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fxgrad.opacus import PrivacyEngine

TRAIN, BATCH, EPOCHS = 1437, 144, 20
PRIVATE_RATE, PLAIN_RATE = 2.0, 1.0
EPSILON, DELTA, MAX_GRAD_NORM = 5.0, 1e-4, 1.0
ROUNDS, WARM_UP = 80, 10
MIN_ACCURACY = 0.9
PLAIN, OURS, HOOKS, GHOST = "not private", "private, fxgrad", "private, Opacus's hooks", "private, Opacus's ghost mode"


@dataclass(frozen=True)
class PrivateTraining:
    plain: list[float]  # accuracy on test images after each epoch
    private: list[float]
    epsilon: float  # what the accountant counted
    noise_multiplier: float
    milliseconds: dict[str, float]  # of one step, medians

    @property
    def ratio(self) -> float:
        """Time of a private step over that by Opacus's hooks."""
        return self.milliseconds[OURS] / self.milliseconds[HOOKS]

    def claims(self) -> list[Claim]:
        return [
            Claim("privacy spent by the private training, ε", self.epsilon, "<=", EPSILON),
            Claim("accuracy of the private training", self.private[-1], ">=", MIN_ACCURACY),
            Claim("time of a private step over that by Opacus's hooks", self.ratio, "<=", 1.0),
        ]


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def train(data: Digits, epochs: int, private: bool, backend: str) -> tuple[list[float], Any, Any]:
    """The accuracy after each epoch, and with `private` the engine and the optimizer."""
    torch.manual_seed(0)
    module = model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=PRIVATE_RATE if private else PLAIN_RATE)
    loader = DataLoader(TensorDataset(data.images, data.labels), BATCH, shuffle=True)
    criterion, engine = nn.CrossEntropyLoss(), None
    if private:
        engine = PrivacyEngine()
        model, optimizer, criterion, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            target_epsilon=EPSILON,
            target_delta=DELTA,
            epochs=epochs,
            max_grad_norm=MAX_GRAD_NORM,
            grad_sample_mode="ghost",
            backend=backend,
        )
    accuracies = []
    for _ in tqdm(range(epochs), desc=f"{'private' if private else 'plain'} training", unit="epoch"):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            right = module(data.test_images).argmax(1) == data.test_truth
        accuracies.append(right.float().mean().item())
    return accuracies, engine, optimizer


def make_step(kind: str, data: Digits, backend: str) -> Callable[[], float]:
    """A whole step of one kind of training on one batch; it returns its milliseconds."""
    torch.manual_seed(0)
    model, criterion = make_cnn(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=PLAIN_RATE)
    loader = DataLoader(TensorDataset(data.images, data.labels), BATCH)
    common: Any = dict(noise_multiplier=1.0, max_grad_norm=MAX_GRAD_NORM, poisson_sampling=False)
    common |= dict(module=model, optimizer=optimizer, data_loader=loader)
    if kind == PLAIN:
        model = torch.compile(model, backend=backend)
    elif kind == HOOKS:
        model, optimizer, _ = opacus.PrivacyEngine().make_private(**common)
    else:
        mode: Any = dict(grad_sample_mode="ghost", criterion=criterion)
        engine, further = (PrivacyEngine(), {"backend": backend}) if kind == OURS else (opacus.PrivacyEngine(), {})
        model, optimizer, criterion, _ = engine.make_private(**common, **mode, **further)
    x, y = data.images[:BATCH], data.labels[:BATCH]

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        return 1e3 * (time.perf_counter() - start)

    return step


def measure_steps(data: Digits, rounds: int, backend: str) -> dict[str, float]:
    """Median milliseconds of a step of each kind, taken in turns."""
    steps = {kind: make_step(kind, data, backend) for kind in (PLAIN, OURS, HOOKS, GHOST)}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in tqdm(range(WARM_UP + rounds), desc="timing steps", unit="round"):
        for kind, step in steps.items():
            times[kind].append(step())
    return {kind: statistics.median(found[WARM_UP:]) for kind, found in times.items()}


def run(quick: bool = False, backend: str = "inductor") -> PrivateTraining:
    data = load_digits(TRAIN)
    epochs = 1 if quick else EPOCHS
    plain, _, _ = train(data, epochs, False, backend)
    private, engine, optimizer = train(data, epochs, True, backend)
    times = measure_steps(data, 2 if quick else ROUNDS, backend)
    return PrivateTraining(plain, private, engine.get_epsilon(DELTA), optimizer.noise_multiplier, times)
