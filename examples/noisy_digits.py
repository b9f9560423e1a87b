"""Find wrong labels by the size of each training image's own gradient.

Some labels of scikit-learn's digits are flipped on purpose and a small CNN is trained on them for
a few epochs. One more pass with `fxgrad.transform` gives every image's own gradient; a label that
the rest of the data speaks against pulls hardest on the weights, so the largest gradients point at
the flipped labels.

    python examples/noisy_digits.py --seed 0 --epochs 8

prints how many of the top-ranked images were flipped, what the gradients cost per step and how far
they are from a plain loop over images, writes a picture, and exits with 1 where it falls short.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import fxgrad

BATCH_SIZE = 64
FLIPPED_SHARE = 0.08
MIN_PRECISION = 0.8
MAX_DIFFERENCE = 1e-4
CLEAN, FLIPPED = "#4c78a8", "#e4572e"


class Digits(NamedTuple):
    images: Tensor  # [N, 1, 8, 8] in 0..1
    labels: Tensor  # [N], some of them wrong
    flipped: Tensor  # [N], True where the label was changed
    truth: Tensor  # [N], the labels as they were


def load_noisy_digits(seed: int) -> Digits:
    """The digits with `FLIPPED_SHARE` of the labels moved to another class."""
    generator = torch.Generator().manual_seed(seed)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    truth = torch.tensor(data.target)
    chosen = torch.randperm(len(truth), generator=generator)[: round(FLIPPED_SHARE * len(truth))]
    labels = truth.clone()
    labels[chosen] += torch.randint(1, 10, (len(chosen),), generator=generator)
    labels %= 10
    return Digits(images, labels, labels != truth, truth)


def make_cnn() -> nn.Module:
    """GroupNorm, not BatchNorm: only a model that treats images alone has per-image gradients.

    SiLU and average pools have no kinks: rounding cannot turn a gradient into another one.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def train(model: nn.Module, digits: Digits, epochs: int, seed: int) -> None:
    """Ordinary training of the plain compiled model."""
    generator = torch.Generator().manual_seed(seed)
    compiled = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = len(digits.labels) // BATCH_SIZE  # full batches only: one compilation
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * batches)
    with tqdm(total=epochs * batches, desc="training", unit="step") as progress:
        for _ in range(epochs):
            order = torch.randperm(len(digits.labels), generator=generator)
            for batch in order[: batches * BATCH_SIZE].split(BATCH_SIZE):
                optimizer.zero_grad()
                loss = F.cross_entropy(compiled(digits.images[batch]), digits.labels[batch])
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                progress.update()
    optimizer.zero_grad()


def per_sample_gradients(gs_model: nn.Module, digits: Digits) -> dict[str, Tensor]:
    """Every image's own gradient, `{name: [N, *shape]}`, in one pass over the data."""
    chunks: dict[str, list[Tensor]] = {name: [] for name, _ in gs_model.named_parameters()}
    for x, y in zip(digits.images.split(BATCH_SIZE), digits.labels.split(BATCH_SIZE), strict=True):
        F.cross_entropy(gs_model(x), y, reduction="sum").backward()
        for name, p in gs_model.named_parameters():
            chunks[name].append(p.grad_sample)
        gs_model.zero_grad()
    return {name: torch.cat(chunk) for name, chunk in chunks.items()}


def loop_gradients(model: nn.Module, digits: Digits) -> dict[str, Tensor]:
    """The same by plain autograd, one image at a time: slow, and plainly right."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows = []
    for i in tqdm(range(len(digits.labels)), desc="checking", unit="image"):
        loss = F.cross_entropy(model(digits.images[i : i + 1]), digits.labels[i : i + 1])
        rows.append(torch.autograd.grad(loss, parameters))
    return {name: torch.stack(g) for name, *g in zip(names, *rows, strict=True)}


def gradient_norms(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1).norm(dim=1)


def precision_at_k(scores: Tensor, flipped: Tensor) -> float:
    """The share of flipped labels among the k highest scores, k = number of flips."""
    return flipped[scores.topk(int(flipped.sum())).indices].float().mean().item()


def measure_steps(model: nn.Module, gs_model: nn.Module, digits: Digits, rounds: int = 100) -> tuple[float, float]:
    """Median milliseconds of a plain compiled step and of one by `gs_model`, taken in turns."""
    x, y = digits.images[:BATCH_SIZE], digits.labels[:BATCH_SIZE]

    def seconds(forward: Callable[[Tensor], Tensor]) -> float:
        start = time.perf_counter()
        F.cross_entropy(forward(x), y, reduction="sum").backward()
        elapsed = time.perf_counter() - start
        fxgrad.zero_grad(model)
        return elapsed

    steps = torch.compile(model), gs_model
    times = torch.tensor([[seconds(step) for step in steps] for _ in range(rounds + 5)])
    plain, ours = (1e3 * times[5:].median(dim=0).values).tolist()  # the first 5 warm up
    return plain, ours


def largest_difference(ours: dict[str, Tensor], loop: dict[str, Tensor]) -> float:
    differences = [(ours[name] - expected).abs().max() for name, expected in loop.items()]
    return torch.stack(differences).max().item()  # unlike Python's max, it lets no NaN pass


def draw(path: Path, digits: Digits, norms: Tensor) -> None:
    """A histogram of the norms, clean against flipped, and the images with the largest ones."""
    with plt.rc_context({"font.size": 10, "axes.titleweight": "bold", "axes.titlepad": 12}):
        figure = plt.figure(figsize=(13, 5.6), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=[1, 1.1], wspace=0.04)
        draw_histogram(left.subplots(), norms, digits.flipped)
        draw_most_surprising(right, digits, norms)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw_histogram(axes: Axes, norms: Tensor, flipped: Tensor) -> None:
    k = int(flipped.sum())
    norms = norms.clamp(min=1e-4)  # what a saturated softmax leaves still has a place on a log axis
    bins = torch.logspace(norms.min().log10().item(), norms.max().log10().item(), 45).tolist()
    for chosen, color, name in (~flipped, CLEAN, "clean"), (flipped, FLIPPED, "flipped"):
        label = f"{name} ({int(chosen.sum()):,} images)"
        axes.hist(norms[chosen].tolist(), bins, color=color, alpha=0.75, label=label)
    threshold = norms.topk(k).values[-1].item()
    axes.axvline(threshold, color="0.25", linestyle="--", linewidth=1)
    where = {"transform": axes.get_xaxis_transform(), "ha": "right", "color": "0.25"}
    axes.text(threshold, 0.76, f"the {k} largest → ", **where)
    axes.set(xscale="log", xlabel="norm of the image's own gradient", ylabel="images")
    axes.set_title("Wrong labels pull hardest on the weights", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")


def draw_most_surprising(figure: SubFigure, digits: Digits, norms: Tensor) -> None:
    title = "The largest gradients: the digit, and what its label says"
    figure.suptitle(title, x=0.02, ha="left", weight="bold", size=12)
    panels = figure.subplots(4, 7).flat
    for axes, i in zip(panels, norms.topk(28).indices.tolist(), strict=True):
        wrong = bool(digits.flipped[i])
        axes.imshow(digits.images[i, 0], cmap="gray_r")
        title = f"{digits.truth[i]} called {digits.labels[i]}" if wrong else f"{digits.labels[i]}"
        axes.set_title(title, size=9, pad=4, weight="normal", color=FLIPPED if wrong else CLEAN)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(color=FLIPPED if wrong else CLEAN, linewidth=2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find flipped labels by per-sample gradients.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--picture", type=Path, default=Path("noisy_digits.png"))
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    digits = load_noisy_digits(arguments.seed)
    k = int(digits.flipped.sum())
    print(f"{len(digits.labels):,} images of digits, the labels of {k} flipped")
    torch.manual_seed(arguments.seed)
    model = make_cnn()
    train(model, digits, arguments.epochs, arguments.seed)

    gs_model = fxgrad.transform(model)  # the same parameters; its backward fills p.grad_sample
    gradients = per_sample_gradients(gs_model, digits)
    difference = largest_difference(gradients, loop_gradients(model, digits))
    plain, ours = measure_steps(model, gs_model, digits)
    norms = gradient_norms(gradients)
    with torch.no_grad():
        losses = F.cross_entropy(model(digits.images), digits.labels, reduction="none")
    precision = precision_at_k(norms, digits.flipped)
    draw(arguments.picture, digits, norms)

    print(f"\nflipped labels among the {k} top-ranked images")
    print(f"    by gradient norm   {precision:6.1%}   (at least {MIN_PRECISION:.0%} wanted)")
    print(f"    by loss            {precision_at_k(losses, digits.flipped):6.1%}")
    print(f"    at random          {precision_at_k(torch.rand(len(norms)), digits.flipped):6.1%}")
    print(f"time per step, {BATCH_SIZE} images, median")
    print(f"    plain compiled     {plain:6.2f} ms")
    print(f"    every gradient     {ours:6.2f} ms   ({ours / plain:.2f} x)")
    print("largest difference from the loop over single images")
    print(f"    {difference:.1e}   (at most {MAX_DIFFERENCE:.0e} wanted)")
    print(f"picture: {arguments.picture}")
    good = precision >= MIN_PRECISION and difference <= MAX_DIFFERENCE
    print("good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
