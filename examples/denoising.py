"""A diffusion U-Net learns to denoise digits, each image's gradient clipped: which noise levels move the weights?

    python examples/denoising.py [--steps 200] [--batch 64]

The U-Net is built as those of diffusers: ResNet blocks with a time embedding and GroupNorm, attention at the coarse
level, a down and an up path with a skip connection. One backward gives the clipped sum to train with and each image's
norm. The exit code is 1 if the last clipped sum is not that of a loop over its images.
"""

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector

import fxgrad

C, LEVELS = 2.0, 100
SHARES = torch.cos(torch.linspace(0, math.pi / 2, LEVELS + 1)[1:]).square()  # of the image in the input, by level


class Block(nn.Module):
    """A ResNet block: [B, c, h, w] and the time embedding [B, e] to [B, o, h, w]."""

    def __init__(self, c, o, e):
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, o, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(e, o))
        self.after = nn.Sequential(nn.GroupNorm(4, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1))
        self.skip = nn.Conv2d(c, o, 1) if c != o else nn.Identity()

    def forward(self, x, time):
        return self.skip(x) + self.after(self.before(x) + self.time(time)[:, :, None, None])


class UNet(nn.Module):
    """Noisy images [B, 1, 8, 8] and levels [B] to the noise in them."""

    def __init__(self, c=16, e=32):
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -3, e // 2))
        self.time = nn.Sequential(nn.Linear(e, e), nn.SiLU(), nn.Linear(e, e))
        self.first, self.last = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 1, 3, padding=1)
        self.down, self.shrink = Block(c, c, e), nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.middle, self.norm = Block(2 * c, 2 * c, e), nn.GroupNorm(4, 2 * c)
        self.attention = nn.MultiheadAttention(2 * c, num_heads=2, batch_first=True)
        self.grow, self.up = nn.Conv2d(2 * c, c, 3, padding=1), Block(2 * c, c, e)

    def forward(self, x, level):
        angles = level[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        fine = self.down(self.first(x), time)
        coarse = self.middle(self.shrink(fine), time)
        places = self.norm(coarse).flatten(2).transpose(1, 2)  # [B, h * w, channels]
        coarse = coarse + self.attention(places, places, places)[0].transpose(1, 2).unflatten(2, coarse.shape[2:])
        grown = self.grow(F.interpolate(coarse, scale_factor=2.0))
        return self.last(F.silu(self.up(torch.cat([grown, fine], 1), time)))


def losses(model, x, level, noise):
    """The mean squared error of the noise in each image: [B]."""
    share = SHARES[level][:, None, None, None]
    return (model(share.sqrt() * x + (1 - share).sqrt() * noise, level) - noise).square().flatten(1).mean(1)


def loop(model, *batch):
    """The clipped sum by plain autograd, one image at a time; all parameters in one vector."""
    each = [losses(model, *[part[i : i + 1] for part in batch]).sum() for i in range(len(batch[0]))]
    rows = [parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))) for loss in each]
    return sum(row * (C / row.norm()).clamp(max=1) for row in rows)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a denoising U-Net with clipped gradients.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # [1797, 1, 8, 8]
    model, clipped, seen = UNet(), fxgrad.ClippedGrad(max_grad_norm=C), []
    gs_model = fxgrad.transform(model, quantity=clipped, backend=options.backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(options.steps):
        x = images[torch.randint(len(images), (options.batch,))]
        level, noise = torch.randint(LEVELS, (options.batch,)), torch.randn_like(x)
        gs_model.zero_grad()
        each = losses(gs_model, x, level, noise)
        each.sum().backward()
        seen.append(torch.stack([level, each.detach(), fxgrad.result(gs_model, clipped).norm_sample]))
        if step == options.steps - 1:  # before the parameters move on
            expected = loop(model, x, level, noise)
            ours = parameters_to_vector(p.grad for p in model.parameters())
            difference = (ours - expected).norm() / expected.norm()
        for p in model.parameters():
            p.grad /= options.batch
        optimizer.step()

    print("noise level    loss   median norm   clipped      in the second half of the training")
    levels, found, norms = torch.cat(seen[len(seen) // 2 :], 1)
    for low in range(0, LEVELS, 20):
        here = (levels >= low) & (levels < low + 20)
        share = (norms[here] > C).float().mean()
        print(f"{low:5d} - {low + 19:3d} {found[here].mean():7.3f} {norms[here].median():13.2f} {share:9.0%}")
    good = difference.item() <= 1e-3
    print(f"the last clipped sum is {difference:.1e} from that of a loop, relative:", "good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
