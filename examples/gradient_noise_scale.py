"""How large should the batch be? The gradient noise scale, measured in every step of an ordinary training.

    python examples/gradient_noise_scale.py [--steps 300] [--batch 64]

The noise scale is B = tr(Σ) / |G|², with G the true gradient and Σ the covariance of single samples' gradients: batches
much smaller than B waste steps, batches much larger waste samples (McCandlish et al., An Empirical Model of
Large-Batch Training, 2018, https://arxiv.org/abs/1812.06162). Without gradients per sample it takes two batch sizes
and many steps to estimate. Here one backward gives the gradient to train with and every sample's norm, and from the
two come unbiased estimates of both numbers:

    tr(Σ) = (mean |g_i|² - |g|²) · b / (b - 1)        |G|² = |g|² - tr(Σ) / b        g = mean of b samples' g_i

A small CNN learns handwritten digits, and prints its noise scale as it does. At the end tr(Σ) of the last batch is
computed by a plain loop over its images. The exit code is 1 if the two differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fxgrad

MAX_DIFFERENCE = 1e-4
DECAY = 0.95  # of the running means: single batches are too noisy


def digits() -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in 0..1, and their labels [N]."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def estimates(norm_sample: Tensor, gradient: Sequence[Tensor]) -> tuple[float, float]:
    """tr(Σ) and |G|², unbiased, from each sample's norm [b] and the mean gradient."""
    b = len(norm_sample)
    squared = sum(g.square().sum().item() for g in gradient)
    trace = (norm_sample.square().mean().item() - squared) * b / (b - 1)
    return trace, squared - trace / b


def loop_trace(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """tr(Σ) by plain autograd, one image at a time."""
    parameters = list(model.parameters())
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]) for loss in losses]
    return torch.stack(rows).var(0).sum().item()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the gradient noise scale while training.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    images, labels = digits()
    model, norms = make_cnn(), fxgrad.NormSample()
    gs_model = fxgrad.transform(model, quantity=[fxgrad.Grad(), norms], loss_reduction="mean", backend=options.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace = squared = 0.0
    print("  step    loss   noise scale")
    for step in range(options.steps):
        batch = torch.randint(len(labels), (options.batch,))
        last = step == options.steps - 1
        gs_model.zero_grad()
        loss = F.cross_entropy(gs_model(images[batch]), labels[batch])
        loss.backward()
        gradient = [p.grad / options.batch for p in model.parameters()]  # Grad: the sum of the samples' own
        found = estimates(fxgrad.result(gs_model, norms), gradient)
        trace, squared = (DECAY * a + (1 - DECAY) * b for a, b in zip((trace, squared), found, strict=True))
        if step % max(1, options.steps // 10) == 0 or last:
            print(f"{step:6d} {loss.item():7.3f} {trace / squared:13.1f}")
        if last:  # before the parameters move on
            expected = loop_trace(model, images[batch], labels[batch])
        for p, g in zip(model.parameters(), gradient, strict=True):
            p.grad = g
        optimizer.step()

    difference = abs(found[0] - expected) / expected
    print(f"tr(Σ) of the last batch: {found[0]:.6f}; by a loop over its images {expected:.6f}")
    good = difference <= MAX_DIFFERENCE
    print("good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
