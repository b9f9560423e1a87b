"""
A quantity of your own
======================

Which samples of a batch pull in another direction than the rest? The cosine between a sample's gradient and the mean
of the batch says so. fxgrad has no such quantity. This example adds it in ten lines, and never stores the gradients.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fxgrad

# %%
# A quantity lists its results in ``deliveries``, and computes them in ``compute`` in the same order. ``grads`` has one
# entry for each parameter, which stands for the gradients of all samples. ``norms``, ``weighted`` and ``dot`` work on
# factors: they do not multiply the gradients out.


class CosineToMean(fxgrad.Quantity):
    """The cosine between each sample's gradient and the sum of all: [B]."""

    def deliveries(self, n, parameters):
        p = next(iter(parameters.values()))
        return [fxgrad.Delivery("result", None, (n,), p.dtype, p.device)]

    def compute(self, grads, n, given):
        dots, squares, of_sum = 0, 0, 0
        for g in grads:
            total = g.weighted(torch.ones_like(g.norms()[0], dtype=g.dtype))  # Σ_i g_i, [*p.shape]
            dots = dots + g.dot(total)  # [B]
            squares = squares + g.norms()[0].square()  # [B]; norms()[1] has upper bounds
            of_sum = of_sum + total.square().sum()
        return [(dots / (squares * of_sum).sqrt()).to(grads[0].dtype)]


# %%
# A tenth of the labels are wrong on purpose. The network is trained for a little while, so that it has not learnt the
# wrong labels by heart.

torch.manual_seed(0)
data = load_digits()
x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
wrong = torch.rand(len(y)) < 0.1
y = torch.where(wrong, (y + torch.randint(1, 10, y.shape)) % 10, y)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.SiLU(), torch.nn.AvgPool2d(2), torch.nn.Flatten(),
    torch.nn.Linear(256, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    batch = torch.randint(len(y), (64,))
    optimizer.zero_grad()
    F.cross_entropy(model(x[batch]), y[batch]).backward()
    optimizer.step()
optimizer.zero_grad()

# %%
# One backward over all images, within the class of each: a wrong label pulls against the others of its class.

cosine = CosineToMean()
compared = fxgrad.transform(model, quantity=cosine, backend="aot_eager")
found = torch.zeros(len(y))
for label in range(10):
    of_class = y == label
    compared.zero_grad()
    F.cross_entropy(compared(x[of_class]), y[of_class], reduction="sum").backward()
    found[of_class] = fxgrad.result(compared, cosine)

bins = torch.linspace(0.4, 1, 31).tolist()
plt.hist(found[~wrong].tolist(), bins, alpha=0.7, density=True, label="right labels")
plt.hist(found[wrong].tolist(), bins, alpha=0.7, density=True, label="wrong labels")
plt.xlabel("cosine between an image's gradient and the sum of its class")
plt.ylabel("density")
plt.legend()
plt.show()
print(f"mean cosine: {found[~wrong].mean():.2f} for right labels, {found[wrong].mean():.2f} for wrong ones")

# %%
# The same from stored gradients, for one class:

gs_model = fxgrad.transform(model, backend="aot_eager")
compared.zero_grad()
F.cross_entropy(gs_model(x[of_class]), y[of_class], reduction="sum").backward()
rows = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)
expected = F.cosine_similarity(rows, rows.sum(0, keepdim=True))
torch.testing.assert_close(found[of_class], expected, rtol=1e-3, atol=1e-4)
