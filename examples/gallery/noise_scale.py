"""
How large should the batch be?
==============================

A gradient over a batch is an estimate. The *gradient noise scale* says how many samples a good estimate needs: batches
that are much smaller are mostly noise, and batches that are much larger repeat themselves (`McCandlish et al. 2018
<https://arxiv.org/abs/1812.06162>`_). It is tr(Σ) / \\|G\\|², with the mean gradient G and the covariance Σ of the
samples' gradients.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fxgrad

torch.manual_seed(0)
data = load_digits()
x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.GroupNorm(4, 16), torch.nn.SiLU(), torch.nn.AvgPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.GroupNorm(4, 32), torch.nn.SiLU(), torch.nn.Flatten(),
    torch.nn.Linear(512, 10),
)  # fmt: skip

# %%
# Both numbers come from one backward: the ordinary gradient, and the norm of each sample's own.

norms = fxgrad.NormSample()
measured = fxgrad.transform(model, quantity=[fxgrad.Grad(), norms], backend="aot_eager")


def noise_and_signal(batch):
    """Return unbiased estimates of tr(Σ) and of |G|². p.grad holds the mean gradient then."""
    measured.zero_grad()
    F.cross_entropy(measured(x[batch]), y[batch], reduction="sum").backward()
    for p in model.parameters():
        p.grad /= len(batch)
    of_mean = sum(p.grad.square().sum() for p in model.parameters())
    mean_of_squares = fxgrad.result(measured, norms).square().mean()
    noise = (mean_of_squares - of_mean) * len(batch) / (len(batch) - 1)
    return noise.item(), (of_mean - noise / len(batch)).item()


# %%
# Now an ordinary training, which measures as it goes. Single batches are noisy, so the picture shows the ratio of two
# running means.

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
noise = signal = 0.0
history = []
for _ in range(300):
    found = noise_and_signal(torch.randint(len(y), (64,)))
    noise, signal = 0.95 * noise + 0.05 * found[0], 0.95 * signal + 0.05 * found[1]
    history.append(noise / signal)
    optimizer.step()

plt.plot(history)
plt.axhline(64, color="0.4", linestyle="--", label="the batch size of this training")
plt.yscale("log")
plt.xlabel("step")
plt.ylabel("gradient noise scale, in images")
plt.legend()
plt.show()
print(f"at step 20: {history[20]:.0f} images; at step 299: {history[-1]:.0f} images")

# %%
# Small batches suffice at first. Later the images agree less about the direction, and a good estimate needs more of
# them. The last step's noise beside plain autograd, image by image:

batch = torch.randint(len(y), (32,))
found = noise_and_signal(batch)[0]
losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in batch.tolist()]
rows = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]) for loss in losses]
torch.testing.assert_close(found, torch.stack(rows).var(0).sum().item(), rtol=1e-3, atol=0)
