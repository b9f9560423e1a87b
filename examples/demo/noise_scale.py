"""How large should the batch be? The gradient noise scale over a training, from single batches and exactly.

The noise scale is B = tr(Σ) / |G|², with G the gradient of all training images and Σ the covariance of single images'
gradients: batches much smaller than B give noise, batches much larger give little more than batches of size B
(McCandlish et al., An Empirical Model of Large-Batch Training, 2018, https://arxiv.org/abs/1812.06162). From the mean
gradient g of a batch of b images, and each image's norm |g_i|, follow unbiased estimates of both numbers:

    tr(Σ) ≈ (mean |g_i|² - |g|²) · b / (b - 1)        |G|² ≈ |g|² - tr(Σ) / b

`fxgrad.NormSample` gives the norms in the backward that the training needs anyway. Every few steps the exact numbers
are computed from the gradients of all training images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from claims import Claim
from digits import Digits, load_digits
from torch import Tensor, nn
from tqdm import tqdm

import fxgrad

TRAIN, BATCH, STEPS, CHECKS, LEARNING_RATE = 1437, 128, 500, 20, 0.05
WINDOW = 25  # steps to each side, over which both estimates are averaged
MIN_RISE, MAX_FACTOR = 3.0, 2.0


@dataclass(frozen=True)
class NoiseScale:
    steps: Tensor  # [CHECKS], those at which everything was computed
    exact: Tensor  # [CHECKS]
    estimates: Tensor  # [STEPS, 2]: tr(Σ) and |G|² by the norms of one batch
    accuracies: Tensor  # [CHECKS], on test images

    @property
    def averaged(self) -> Tensor:
        """The estimates of the noise scale at `steps`: mean tr(Σ) over mean |G|² of the steps around, [CHECKS]."""
        windows = [self.estimates[max(0, step - WINDOW) : step + WINDOW + 1] for step in self.steps.tolist()]
        trace, squared = torch.stack([window.mean(0) for window in windows]).T
        return trace / squared

    @property
    def rise(self) -> float:
        """The exact scale at the end over that at the start; means of three checks."""
        return (self.exact[-3:].mean() / self.exact[:3].mean()).item()

    @property
    def factor(self) -> float:
        """The median factor between estimate and exact scale, 1 or more; a negative estimate counts as infinite."""
        logs = (self.averaged / self.exact).log().abs().nan_to_num(nan=torch.inf)
        return logs.median().exp().item()

    def claims(self) -> list[Claim]:
        return [
            Claim("growth of the noise scale over the training", self.rise, ">=", MIN_RISE),
            Claim("median factor between estimated and exact noise scale", self.factor, "<=", MAX_FACTOR),
        ]


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def estimates(norms: Tensor, gradient: list[Tensor]) -> tuple[float, float]:
    """Estimate tr(Σ) and |G|² from the norms [b] of a batch's images and their mean gradient."""
    b = len(norms)
    squared = sum(g.square().sum().item() for g in gradient)
    trace = (norms.square().mean().item() - squared) * b / (b - 1)
    return trace, squared - trace / b


def exact_scale(gs_model: nn.Module, data: Digits) -> float:
    """tr(Σ) / |G|² from the gradients of all training images."""
    fxgrad.zero_grad(gs_model)
    F.cross_entropy(gs_model(data.images), data.labels, reduction="sum").backward()
    rows = torch.cat([fxgrad.delivered(p).flatten(1) for p in gs_model.parameters()], dim=1)
    fxgrad.zero_grad(gs_model)
    return (rows.var(0, correction=0).sum() / rows.mean(0).square().sum()).item()


def run(quick: bool = False, backend: str = "inductor") -> NoiseScale:
    data = load_digits(TRAIN)
    torch.manual_seed(0)
    model, norms = make_mlp(), fxgrad.NormSample()
    training = fxgrad.transform(model, quantity=[fxgrad.Grad(), norms], loss_reduction="mean", backend=backend)
    whole = fxgrad.transform(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    steps = 40 if quick else STEPS
    checked = torch.linspace(0, steps - 1, CHECKS).long()
    exact, accuracies, found = [], [], []
    for step in tqdm(range(steps), desc="noise scale: training", unit="step"):
        if step in checked:
            exact.append(exact_scale(whole, data))
            with torch.no_grad():
                right = model(data.test_images).argmax(1) == data.test_truth
            accuracies.append(right.float().mean().item())
        batch = torch.randint(TRAIN, (BATCH,))
        training.zero_grad()
        F.cross_entropy(training(data.images[batch]), data.labels[batch]).backward()
        for p in model.parameters():
            p.grad /= BATCH  # Grad gives the sum over the batch
        gradient = [p.grad for p in model.parameters()]
        found.append(estimates(fxgrad.result(training, norms), gradient))
        optimizer.step()
    return NoiseScale(checked, torch.tensor(exact), torch.tensor(found), torch.tensor(accuracies))
