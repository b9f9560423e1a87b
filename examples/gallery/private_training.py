"""
Accuracy against epsilon
========================

Differentially private training limits how much one person's record can change the trained model. The limit is called
epsilon. A smaller epsilon protects more, needs more noise, and costs accuracy. This example trains the same network
on handwritten digits for several values of epsilon and draws the price.
"""

import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fxgrad.opacus

warnings.filterwarnings("ignore", message="Secure RNG turned off")  # right for an experiment
warnings.filterwarnings("ignore", message="Optimal order is the")  # of an accountant's search
data = load_digits()
order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
train, test = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])
EPOCHS, BATCH, DELTA = 10, 128, 1e-4

# %%
# One private training. Opacus draws the batches, adds the noise and counts epsilon. fxgrad clips each image's gradient
# to a norm of 1 in the backward, so no gradient of a single image is stored.


def train_privately(epsilon, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = fxgrad.opacus.make_private_with_epsilon(
        engine,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
        data_loader=DataLoader(train, batch_size=BATCH),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
        one_backward=True,
        backend="eager",
    )
    for _ in range(EPOCHS):
        for some_x, some_y in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(some_x), some_y).backward()
            optimizer.step()
    assert engine.get_epsilon(DELTA) <= epsilon
    with torch.no_grad():
        return (model(test[0]).argmax(1) == test[1]).float().mean().item()


# %%
# The same network without privacy, for comparison:


def train_openly(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(EPOCHS):
        for some_x, some_y in DataLoader(train, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(some_x), some_y).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(test[0]).argmax(1) == test[1]).float().mean().item()


# %%
# Two seeds for each epsilon. A line joins their means.

epsilons, seeds = [0.25, 0.5, 1.0, 2.0, 8.0], range(2)
private = torch.tensor([[train_privately(epsilon, seed) for seed in seeds] for epsilon in epsilons])
plain = sum(train_openly(seed) for seed in seeds) / len(seeds)

plt.plot(epsilons, private.mean(1).tolist(), "-o", label="private, mean of two seeds")
for epsilon, found in zip(epsilons, private.tolist(), strict=True):
    plt.plot([epsilon] * len(found), found, "_", color="C0")
plt.axhline(plain, color="0.4", linestyle="--", label="without privacy")
plt.xscale("log")
plt.minorticks_off()
plt.xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
plt.xlabel(f"epsilon, at delta = {DELTA:g}")
plt.ylabel("accuracy on 297 test images")
plt.legend()
plt.show()

# %%
# The figures of the picture:

for epsilon, mean in zip(epsilons, private.mean(1).tolist(), strict=True):
    print(f"epsilon {epsilon:4g}: {mean:.1%} right")
print(f"without privacy: {plain:.1%} right")

# %%
# There are only 1,500 training images. With more data, the same epsilon costs less accuracy: the noise stays the same,
# and the sum of the clipped gradients grows.
