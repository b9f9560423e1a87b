"""
The exact diagonal of the curvature
===================================

The generalised Gauss-Newton matrix describes how the loss curves around the trained weights. Its diagonal says which
weights the data determine, and so how sure the network may be: the Laplace approximation. This example computes the
diagonal exactly, for cross entropy, with ``fxgrad.SquaredGrad``.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons

import fxgrad

torch.manual_seed(0)
points, labels = make_moons(200, noise=0.15, random_state=0)
x, y = torch.tensor(points), torch.tensor(labels)  # float64
model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
for _ in range(500):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

# %%
# For one sample with probabilities p, the curvature of cross entropy by the outputs is diag(p) - p pᵀ = Σ s sᵀ, with
# one vector s = √p_c (e_c - p) for each class c. So the matrix is the sum of g gᵀ for the gradients g of s · outputs.
# Its diagonal is a sum of squares: one backward for each class.


def diagonal(model, x):
    """The diagonal of the generalised Gauss-Newton matrix, by parameter."""
    squared = fxgrad.transform(model, quantity=fxgrad.SquaredGrad(), backend="aot_eager")
    total = {}
    for label in range(2):
        squared.zero_grad()
        outputs = squared(x)
        p = outputs.detach().softmax(1)
        s = p[:, label, None].sqrt() * (F.one_hot(torch.tensor(label), 2) - p)
        (s * outputs).sum().backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + parameter.squared_grad_sum
    squared.zero_grad()
    return total


found = diagonal(model, x)

# %%
# The same by the whole matrix, from Jacobians of ``torch.func``:

parameters = {name: p.detach() for name, p in model.named_parameters()}


def outputs_of(parameters, row):
    return torch.func.functional_call(model, parameters, (row,))


jacobian = torch.func.vmap(torch.func.jacrev(outputs_of), (None, 0))(parameters, x)  # by name: [200, 2, *shape]
p = model(x).detach().softmax(1)
inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]  # [200, 2, 2]
for name, j in jacobian.items():
    expected = torch.einsum("nc...,ncd,nd...->...", j, inner, j)
    torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)

# %%
# The Laplace approximation gives each weight the variance 1 / (curvature + prior). Networks drawn from it agree near
# the data and disagree far away. The left picture shows the network's own answer, the right one the mean of 100 draws.

PRIOR = 1.0
grid = torch.linspace(-4, 5, 80, dtype=torch.float64)
plane = torch.cartesian_prod(grid, grid)
with torch.no_grad():
    own = model(plane).softmax(1)[:, 1]
    mean = torch.zeros_like(own)
    for _ in range(100):
        drawn = {
            name: w + torch.randn_like(w) / (found[name] + PRIOR).sqrt() for name, w in parameters.items()
        }  # fmt: skip
        mean += torch.func.functional_call(model, drawn, (plane,)).softmax(1)[:, 1] / 100

figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
for axis, answer, title in zip(axes, (own, mean), ("the network alone", "100 networks drawn around it"), strict=True):
    shown = axis.contourf(grid, grid, answer.view(80, 80).T, levels=torch.linspace(0, 1, 11).tolist(), cmap="RdBu")
    axis.scatter(*points.T, c=labels, cmap="RdBu", edgecolor="k", s=15)
    axis.set_title(title)
figure.colorbar(shown, ax=axes, label="probability of the blue class")
plt.show()

far = (plane.abs().amax(1) > 3.5).numpy()
sure = [(answer - 0.5).abs()[far].mean().item() + 0.5 for answer in (own, mean)]
print(f"far from the data, the network is {sure[0]:.0%} sure on average, and the mean of the draws {sure[1]:.0%}")
