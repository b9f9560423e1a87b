"""
A schedule for the clipping bound
=================================

In private training, each gradient is clipped to a norm C, and the noise is proportional to C. Gradients change during
training, so a constant C may be too small at first or too large later. This example compares constants with a
schedule, at one noise multiplier: a step's privacy cost does not depend on C.
"""

import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fxgrad

data = load_digits()
order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
x, y, test_x, test_y = x[:1500], y[:1500], x[1500:], y[1500:]
STEPS, RATE, SIGMA, RATE_OF_LEARNING = 200, 1 / 12, 4.0, 1.0

# %%
# C is a tensor, and each backward reads it. Writing to it compiles nothing.

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
start = {name: value.clone() for name, value in model.state_dict().items()}
C = torch.tensor(1.0)
clipped = fxgrad.ClippedGrad(max_grad_norm=C)
private = fxgrad.transform(model, quantity=clipped, backend="aot_eager")


def train(schedule, seed):
    """Train by DP-SGD; return the accuracy, and the share of clipped samples by step."""
    model.load_state_dict(start)
    generator = torch.Generator().manual_seed(seed)
    shares = []
    for step in range(STEPS):
        C.fill_(schedule(step))
        batch = (torch.rand(len(y), generator=generator) < RATE).nonzero()[:, 0]  # each image by chance
        private.zero_grad()
        F.cross_entropy(private(x[batch]), y[batch], reduction="sum").backward()
        shares.append((fxgrad.result(private, clipped).norm_sample > C).float().mean().item())
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator) * SIGMA * C
                p -= RATE_OF_LEARNING * (p.grad + noise) / (RATE * len(y))
    private.zero_grad()
    with torch.no_grad():
        return (model(test_x).argmax(1) == test_y).float().mean().item(), shares


# %%
# Three constants, and a schedule that leads from the largest to the smallest:

schedules = {
    "constant 2": lambda step: 2.0,
    "constant 0.7": lambda step: 0.7,
    "constant 0.2": lambda step: 0.2,
    "from 2 to 0.2": lambda step: 0.2 + 1.8 * (1 + math.cos(math.pi * step / STEPS)) / 2,
}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, schedule in schedules.items():
    results = [train(schedule, seed) for seed in range(3)]
    accuracy = sum(result[0] for result in results) / 3
    left.plot([schedule(step) for step in range(STEPS)], label=f"{name}: {accuracy:.1%} right")
    right.plot(torch.tensor(results[0][1]).view(-1, 5).mean(1).repeat_interleave(5), label=name)
    print(f"{name}: {accuracy:.1%} of the test images right, mean of three runs")
left.set(xlabel="step", ylabel="C")
right.set(xlabel="step", ylabel="share of clipped images")
left.legend()
right.legend()
plt.show()

# %%
# A large C adds too much noise, and a small one learns slowly. The schedule does as well as the best
# constant, which a user does not know beforehand.
#
# With Opacus, pass ``max_grad_norm=C`` to ``fxgrad.opacus.make_private``: its schedulers work, too, and its accountant
# counts the steps.
