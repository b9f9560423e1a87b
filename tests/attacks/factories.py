"""New tensors that are made of samples, and those that only take a shape, a dtype or a device."""

from __future__ import annotations

import torch

from tests.attacks.model import attacks

ATTACKS = attacks(
    "factories",
    right={
        "zeros_like": lambda m, x: m(x) + torch.zeros_like(x),
        "ones of a shape": lambda m, x: m(x) * torch.ones(x.shape[0], 3),
        "new_zeros": lambda m, x: m(x) + x.new_zeros(3),
        "new_full": lambda m, x: m(x) + x.new_full((3,), 2.0),
        "full_like": lambda m, x: m(x) * torch.full_like(x, 2.0),
        "type_as, for a dtype": lambda m, x: m(x) + torch.arange(3).type_as(x),
        "to, for a dtype": lambda m, x: m(x) + torch.arange(3).to(x),
        "to the dtype": lambda m, x: m(x) + torch.arange(3).to(x.dtype),
        "expand_as": lambda m, x: m(x) * torch.arange(3.0).expand_as(x),
        "a constant tensor": lambda m, x: m(x) * torch.tensor([1.0, 2.0, 3.0]),
        "new_tensor of numbers": lambda m, x: m(x) * x.new_tensor([1.0, 2.0, 3.0]),
        "linspace of numbers": lambda m, x: m(x) * torch.linspace(0, 1, 3),
        "linspace up to a parameter's sum": lambda m, x: m(x) * torch.linspace(0, m.bias.sum(), 3),
        "logspace up to a parameter's sum": lambda m, x: m(x) * torch.logspace(0, m.bias.sum().sigmoid(), 3),
        "arange of features": lambda m, x: m(x) * torch.arange(x.shape[1]),
        "eye": lambda m, x: m(x @ torch.eye(3)),
    },
    refused={
        "linspace between the extremes": lambda m, x: m(x) * torch.linspace(x.min(), x.max(), 3),
        "logspace up to the largest": lambda m, x: m(x) * torch.logspace(0, x.max(), 3),
        "tensor of the largest": lambda m, x: m(x) * torch.tensor(x.max()),
        "as_tensor of the largest": lambda m, x: m(x) * torch.as_tensor(x.max()),
        "new_tensor of the largest": lambda m, x: m(x) * x.new_tensor(x.max()),
        "full of the largest": lambda m, x: m(x) * torch.full((3,), x.max()),
        "full_like of the largest": lambda m, x: m(x) * torch.full_like(x, x.max()),
        "new_full of the largest": lambda m, x: m(x) * x.new_full((3,), x.max()),
        "scalar_tensor of the largest": lambda m, x: m(x) * torch.scalar_tensor(x.max()),
        "one_hot of a row of ids": lambda m, x: m(x) * torch.nn.functional.one_hot(x.argmax(0) % 3, 3).sum(0),
        "bincount": lambda m, x: m(x) * torch.bincount(x.argmax(1), minlength=3),
        "histc": lambda m, x: m(x) * torch.histc(x, 3),
        "normal of samples": lambda m, x: m(x) + torch.normal(x.mean(0), 0.0),
        "meshgrid": lambda m, x: m(x) * torch.meshgrid(x[:, 0], x[:, 1], indexing="ij")[1].sum(1, keepdim=True),
        "cartesian": lambda m, x: m(torch.cartesian_prod(x[:, 0], x[:, 1], x[:, 2])[: x.shape[0]]),
        "combinations": lambda m, x: m(x) + torch.combinations(x[:, 0]).sum(),
        "vander": lambda m, x: m(x) * torch.vander(x[:, 0], 3).sum(0),
        "block_diag": lambda m, x: m(x) * torch.block_diag(*x.unbind(0)).sum(),
        "complex of two": lambda m, x: m(x) * torch.complex(x.sum(0), x.sum(0)).real,
        "cov": lambda m, x: m(x @ torch.cov(x.t())),
        "corrcoef": lambda m, x: m(x @ torch.corrcoef(x.t())),
    },
)
