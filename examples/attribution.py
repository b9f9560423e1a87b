"""Which training images made the model answer so? TRAK over several checkpoints, none of which is compiled again.

    python examples/attribution.py [--checkpoints 4] [--dim 256]

TRAK (Park et al., TRAK: Attributing Model Behavior at Scale, 2023, https://arxiv.org/abs/2303.14186) takes each
image's gradient φ of the margin log(p / (1 - p)) of its label, projected to `dim` numbers, as the features of a linear
model that stands in for the network. The score of training image i for test image t is then

    τ(t, i) = φ(t)ᵀ (ΦᵀΦ)⁻¹ φ(i) · (1 - p_i),    averaged over checkpoints.

`fxgrad.GradProjection` gives the projected gradients: those of the parameters are never all held. One transformed model
serves all checkpoints, by `load_state_dict`.

Small CNNs begin to learn handwritten digits: one that is sure of every answer has no margin left to explain. Of the ten
training images that speak most for a test image, nearly all should show its digit, and the projections should keep the
inner products of whole gradients, which are computed by a plain loop. The exit code is 1 if one of these does not hold,
or if a checkpoint but the first was compiled for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxgrad

BATCH, TOP = 64, 10
MIN_SHARE = 0.8  # of the TOP images that show the test image's digit
RIDGE = 1e-2  # of ΦᵀΦ's mean eigenvalue


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


def train(x: Tensor, y: Tensor, epochs: int, seed: int) -> dict[str, Any]:
    """A checkpoint: the state of a network after some epochs."""
    torch.manual_seed(seed)
    model = make_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.state_dict()


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """log(p / (1 - p)) of the label: [B]."""
    others = logits.masked_fill(F.one_hot(y, logits.shape[1]).bool(), -torch.inf)
    return logits.gather(1, y[:, None])[:, 0] - others.logsumexp(1)


def features(gs_model: nn.Module, projection: fxgrad.GradProjection, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The projected gradients φ [N, dim] and 1 - p [N]."""
    rows, doubts = [], []
    for part, label in zip(x.split(BATCH), y.split(BATCH), strict=True):
        gs_model.zero_grad()
        found = margin(gs_model(part), label)
        found.sum().backward()
        rows.append(fxgrad.result(gs_model, projection))
        doubts.append(torch.sigmoid(-found.detach()))
    return torch.cat(rows), torch.cat(doubts)


def scores(train_rows: Tensor, doubts: Tensor, test_rows: Tensor) -> Tensor:
    """τ of one checkpoint: [tests, trains]."""
    kernel = train_rows.T @ train_rows
    kernel += RIDGE * kernel.diagonal().mean() * torch.eye(len(kernel))
    return test_rows @ torch.linalg.solve(kernel, train_rows.T) * doubts


def loop_products(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The inner products of whole gradients, by plain autograd: [N, N]."""
    parameters = list(model.parameters())
    found = [torch.autograd.grad(margin(model(x[i : i + 1]), y[i : i + 1]).sum(), parameters) for i in range(len(x))]
    rows = torch.stack([torch.cat([g.flatten() for g in grads]) for grads in found])
    return rows @ rows.T


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Attribute a network's answers to its training images.")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--images", type=int, default=1500, help="training images; 64 more are attributed")
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    x, y = images[: options.images], labels[: options.images]
    test_x, test_y = images[-BATCH:], labels[-BATCH:]
    model, projection = make_cnn(), fxgrad.GradProjection(dim=options.dim, seed=0)
    gs_model = fxgrad.transform(model, quantity=projection, backend=options.backend)

    total = torch.zeros(len(test_y), len(y))
    compiled = [counters["stats"]["unique_graphs"]]
    for seed in range(options.checkpoints):
        gs_model.load_state_dict(train(x, y, options.epochs, seed))
        train_rows, doubts = features(gs_model, projection, x, y)
        test_rows, _ = features(gs_model, projection, test_x, test_y)
        total += scores(train_rows, doubts, test_rows) / options.checkpoints
        compiled.append(counters["stats"]["unique_graphs"])

    chosen = total.topk(TOP).indices
    share = (y[chosen] == test_y[:, None]).float().mean().item()
    products = loop_products(model, test_x, test_y)
    scale = products.diagonal().sqrt()
    error = ((test_rows @ test_rows.T - products) / scale / scale[:, None]).square().mean().sqrt().item()
    expected = 2 * options.dim**-0.5  # a random projection's own error is about dim**-0.5
    first, again = compiled[1] - compiled[0], compiled[-1] - compiled[1]
    print(f"{share:.1%} of the {TOP} images that speak most for an answer show its digit (wanted: {MIN_SHARE:.0%})")
    print(f"cosines of projected gradients: off by {error:.3f} (at most {expected:.3f} wanted)")
    print(f"{first} graph(s) for the first of {options.checkpoints} checkpoints, {again} for the others")
    good = share >= MIN_SHARE and error <= expected and again == 0
    print("good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
