"""
An operator of your own
=======================

A model may use an operator for which fxgrad has no rule: a kernel of your own, or a function that stays one node of the
graph. fxgrad differentiates it by the generic rule, or by a rule that you write. This example does both with a layer
of radial basis functions.
"""

import matplotlib.pyplot as plt
import torch

import fxgrad


def bumps(x, centres):
    """exp(-(x - c)²) for each centre c: [B, 1] -> [B, K]."""
    return torch.exp(-((x - centres) ** 2))


# %%
# ``register_op`` declares that the function treats each sample alone. fxgrad then derives the gradient by calling the
# function's own backward for each sample.

fxgrad.register_op(bumps)


class Curve(torch.nn.Module):
    """A weighted sum of bumps, whose centres are trained."""

    def __init__(self):
        super().__init__()
        self.centres = torch.nn.Parameter(torch.linspace(-4, 4, 9, dtype=torch.float64))
        self.head = torch.nn.Linear(9, 1).double()

    def forward(self, x):
        return self.head(bumps(x, self.centres))[:, 0]


torch.manual_seed(0)
x = torch.linspace(-5, 5, 201, dtype=torch.float64)[:, None]
model = Curve()
gs_model = fxgrad.transform(model, backend="aot_eager")
gs_model(x).sum().backward()
generic = model.centres.grad_sample
gs_model.zero_grad()
print(generic.shape)

# %%
# A rule is the better choice if you know the formula. It gets ``g``, the gradient of the operator's output, and the
# operator's arguments. It returns each sample's gradient. ``check_rule`` compares it with a loop over single samples,
# and raises if it is wrong.


@fxgrad.implements_per_sample_grads(bumps, of=["centres"])
def bumps_rule(g, x, centres):
    """y = exp(-(x - c)²)     dc_n = g_n y 2 (x - c)"""
    return {"centres": g * bumps(x, centres) * 2 * (x - centres)}


fxgrad.testing.check_rule(bumps, x[:7], model.centres)

# %%
# Models that are transformed from now on use the rule.

gs_model = fxgrad.transform(model, backend="aot_eager")
gs_model(x).sum().backward()
torch.testing.assert_close(model.centres.grad_sample, generic)
print(fxgrad.explain(model, x))

# %%
# The picture shows row i of ``grad_sample`` for each x_i: how the curve would move there if a centre moved.

for k in (2, 4, 6):
    plt.plot(x[:, 0], model.centres.grad_sample[:, k], label=f"centre at {model.centres[k].item():g}")
plt.xlabel("x")
plt.ylabel("gradient of the curve's value at x")
plt.legend()
plt.show()

# %%
# A wrong rule does not pass. Here the factor 2 is missing:

gs_model.zero_grad()


def wrong(x, centres):
    return torch.exp(-((x - centres) ** 2))


@fxgrad.implements_per_sample_grads(wrong, of=["centres"])
def wrong_rule(g, x, centres):
    return {"centres": g * wrong(x, centres) * (x - centres)}


try:
    fxgrad.testing.check_rule(wrong, x[:7], model.centres)
except fxgrad.errors.RuleError as error:
    print(error)
else:
    raise RuntimeError("a wrong rule passed")
