"""
Norms of single samples
=======================

A batch's gradient hides which samples it comes from. Here a small network learns handwritten digits, and one backward
gives the norm of every image's own gradient. The images with the largest norms are the ones that the network still gets
wrong.
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
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.Flatten(),
    torch.nn.Linear(256, 10),
)  # fmt: skip

# %%
# The model is trained as usual. ``Grad`` is the ordinary gradient, and ``NormSample`` comes with it from the same
# backward. No gradient of a single sample is stored.

norms = fxgrad.NormSample()
measured = fxgrad.transform(model, quantity=[fxgrad.Grad(), norms], backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = []
for _ in range(150):
    batch = torch.randint(len(y), (64,))
    measured.zero_grad()
    F.cross_entropy(measured(x[batch]), y[batch], reduction="sum").backward()
    history.append(fxgrad.result(measured, norms))
    optimizer.step()

# %%
# A few samples dominate more and more.

history = torch.stack(history)
levels = [0.1, 0.5, 0.9, 0.99]
for level, line in zip(levels, history.quantile(torch.tensor(levels), dim=1), strict=True):
    plt.plot(line.numpy(), label=f"{level:.0%} of the batch below")
plt.xlabel("step")
plt.ylabel("norm of one image's gradient")
plt.yscale("log")
plt.legend()
plt.show()

# %%
# Now the norms of all 1,797 images, and the ten images with the largest.

measured.zero_grad()
out = measured(x)
F.cross_entropy(out, y, reduction="sum").backward()
largest = fxgrad.result(measured, norms).topk(10)
figure, axes = plt.subplots(2, 5, figsize=(8, 4))
for axis, norm, i in zip(axes.flat, *largest, strict=True):
    axis.imshow(x[i, 0].numpy(), cmap="gray_r")
    axis.set_title(f"{y[i]} read as {out[i].argmax()}\nnorm {norm:.1f}", fontsize=9)
    axis.axis("off")
figure.tight_layout()
plt.show()

# %%
# One of these norms beside plain autograd:

i = int(largest.indices[0])
alone = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
torch.testing.assert_close(torch.cat([g.flatten() for g in alone]).norm(), largest.values[0], rtol=1e-4, atol=0)
