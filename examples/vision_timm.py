"""Fine-tune a vision transformer of timm by DP-SGD's step: clip each image's gradient, add noise to the sum.

    python examples/vision_timm.py [--steps 150] [--batch 128]

Nothing is downloaded: plain training on some digits stands for the pretrained weights. The images to fine-tune on are
mirrored, and `fxgrad.ClippedGrad` makes p.grad the sum of min(1, C / |g_i|) g_i. No privacy budget is counted here;
lora_private.py does that. The exit code is 1 if the last clipped sum is not that of a loop over its images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import fxgrad

C, SIGMA, LR = 1.0, 0.5, 2e-3
PUBLIC, TEST = 600, 400  # images for the plain training, and for the accuracy; those between are fine-tuned on
SIZES = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}


def pretrain(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for _ in range(steps):
        batch = torch.randint(len(y), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean()


def loop(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The clipped sum by plain autograd, one image at a time; all parameters in one vector."""
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(y))]
    rows = [parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))) for loss in losses]
    return sum((row * (C / row.norm()).clamp(max=1) for row in rows), torch.zeros(()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fine-tune a vision transformer with clipped gradients.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **SIZES)
    pretrain(model, x[:PUBLIC], y[:PUBLIC], options.steps)
    x = x.flip(3)
    before = accuracy(model, x[-TEST:], y[-TEST:])

    clipped = fxgrad.ClippedGrad(max_grad_norm=C)
    private = fxgrad.transform(model, quantity=clipped, backend=options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    print("  step    loss   median norm   clipped")
    for step in range(options.steps):
        batch = torch.randint(PUBLIC, len(y) - TEST, (options.batch,))
        private.zero_grad()
        loss = F.cross_entropy(private(x[batch]), y[batch], reduction="sum")
        loss.backward()
        norms = fxgrad.result(private, clipped).norm_sample  # [batch]: before the clipping
        if step % max(1, options.steps // 10) == 0:
            mean, share = loss.item() / options.batch, (norms > C).float().mean()
            print(f"{step:6d} {mean:7.3f} {norms.median():13.2f} {share:9.0%}")
        if step == options.steps - 1:  # before the parameters move on
            expected = loop(model, x[batch], y[batch])
            ours = parameters_to_vector(p.grad for p in model.parameters())
            difference = (ours - expected).norm() / expected.norm()
        for p in model.parameters():
            p.grad = (p.grad + SIGMA * C * torch.randn_like(p)) / options.batch
        optimizer.step()

    after = accuracy(model, x[-TEST:], y[-TEST:])
    print(f"accuracy on {TEST} other mirrored images: {before:.1%} before the fine-tuning, {after:.1%} after it")
    good = difference.item() <= 1e-3
    print(f"the last clipped sum is {difference:.1e} from that of a loop, relative:", "good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
