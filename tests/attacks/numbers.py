"""Python numbers that are made of samples: the graph holds them, and no tensor does."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.attacks.model import attacks


def read(m: Any, k: int) -> int:
    """A whole number that only the parameters' values say: k."""
    return int(m.bias.detach().abs().sum().item() / 100) + k


ATTACKS = attacks(
    "numbers",
    right={
        "the number of features": lambda m, x: m(x) / x.shape[1],
        "the root of the number of features": lambda m, x: m(x) / math.sqrt(x.shape[-1]),
        "a constant's number": lambda m, x: m(x) * torch.tensor(0.3, dtype=x.dtype).item(),
        "the number of dimensions": lambda m, x: m(x) * x.dim(),
        "the number of a sample's elements": lambda m, x: m(x) / x[0].numel(),
        "a parameter's value": lambda m, x: m(x) * m.bias[0].item(),
        "a parameter's sum": lambda m, x: m(x) * float(m.weight.detach().sum()),
        "a bound of a constant": lambda m, x: m(x).clamp(max=torch.arange(3.0).mean().item()),
        "the size of a slice": lambda m, x: m(x) * x[:, 1:].shape[1],
        "a dtype's eps": lambda m, x: m(x) + torch.finfo(x.dtype).eps,
        "the length of a list": lambda m, x: m(x) * len([x, x]),
        "a sum over features": lambda m, x: m(x) * x.sum(1, keepdim=True),
        "scaled by a number of parameters": lambda m, x: m(x) * read(m, 2),
        "clamped at a number of parameters": lambda m, x: m(x).clamp(max=read(m, 2)),
        "a weight's rows, no longer than a number read": lambda m, x: (
            m(x) * m.weight.renorm(2, 0, m.memory.sum().item() / 9).sum()
        ),
        "as many ones as parameters say": lambda m, x: (m(x)[:, :1] * torch.ones(read(m, 3))).sum(1),
        "as many largest as parameters say": lambda m, x: m(x) * x.topk(read(m, 2), 1).values.sum(1, keepdim=True),
    },
    refused={
        "a count as a truth": lambda m, x: m(x).sum() * (x > 0).long().sum().bool(),
        "indices and a number of parameters": lambda m, x: m(x)[torch.arange(x.shape[0]) + read(m, 0)].sum(0),
        "indices modulo a number of parameters": lambda m, x: m(x)[torch.arange(x.shape[0]) % read(m, 200)].sum(0),
        "indices and a table of such numbers": lambda m, x: m(x)[
            torch.arange(x.shape[0]) + torch.full((x.shape[0],), read(m, 0))
        ].sum(0),
        "rolled by a number of parameters": lambda m, x: m(x) - m(x).roll(read(m, 0), 0),
        "as many samples as parameters say": lambda m, x: m(x)[: read(m, 100)].sum(0),
        "from the sample on that parameters say": lambda m, x: m(x) + m(x)[read(m, 100) :].sum(0),
        "repeated as parameters say": lambda m, x: m(x).repeat(read(m, 2), 1) * m(x).repeat(read(m, 2), 1),
        "viewed as parameters say": lambda m, x: m(x) * x.repeat(1, 2).view(x.shape[0], read(m, 2), 3).flip(0).sum(1),
        "divided by the largest": lambda m, x: m(x / x.abs().max().item()),
        "multiplied by the sum": lambda m, x: m(x) * float(x.sum()),
        "multiplied by a count": lambda m, x: m(x) * int((x > 0).sum()),
        "the root of a mean": lambda m, x: m(x) / math.sqrt(x.square().mean().item()),
        "clamped at the mean": lambda m, x: m(x).clamp(max=x.mean().item()),
        "clamped at the mean, before the layer": lambda m, x: m(x.clamp(min=x.mean().item())),
        "the number of positive elements": lambda m, x: m(x) * x[x > 0].shape[0],
        "the length of the positive elements": lambda m, x: m(x) * len(x[x > 0]),
        "the size of nonzero": lambda m, x: m(x) * x.nonzero().size(0),
        "the numel of a selection": lambda m, x: m(x) * torch.masked_select(x, x > 0).numel(),
        "the number of unique values": lambda m, x: m(x) * torch.unique(x.round()).shape[0],
        "one sample's element": lambda m, x: m(x) * x[0, 0].item(),
        "the last sample's element": lambda m, x: m(x) * float(x[-1, -1]),
        "two numbers added": lambda m, x: m(x) * (x[0, 0].item() + x.sum().item()),
        "a number of a number": lambda m, x: m(x) * math.exp(math.tanh(x.mean().item())),
        "a power": lambda m, x: (m(x).abs() + 1).pow(x.mean().item()),
        "alpha of an addition": lambda m, x: torch.add(m(x), m(x), alpha=x.mean().item()),
        "a leaky relu's slope": lambda m, x: torch.nn.functional.leaky_relu(m(x), x.mean().item()),
        "a threshold": lambda m, x: torch.nn.functional.threshold(m(x), x.mean().item(), 0.0),
        "a value to fill in": lambda m, x: m(m(x).masked_fill(x > 0, x.mean().item())),
        "a value to pad with": lambda m, x: m(torch.nn.functional.pad(x, (0, 1), value=x.mean().item())[:, 1:]),
        "an eps": lambda m, x: torch.nn.functional.layer_norm(m(x), (3,), eps=x.abs().mean().item()),
        "a slope of softplus": lambda m, x: torch.nn.functional.softplus(m(x), beta=x.abs().mean().item()),
        "a full tensor": lambda m, x: m(x) * torch.full((3,), x.mean().item()),
        "a scalar tensor": lambda m, x: m(x) * torch.tensor(x.mean().item()),
        "a list of numbers": lambda m, x: m(x) * torch.tensor([x.mean().item(), 1.0, 2.0]),
        "where of a number": lambda m, x: m(torch.where(x > 0, m(x), x.mean().item())),
        "a linspace": lambda m, x: m(x) * torch.linspace(0, x.max().item(), 3),
        "lerp's weight": lambda m, x: torch.lerp(m(x), x, x.mean().item()),
        "a number into a list": lambda m, x: m(x) * sum([v.item() for v in x.mean(0).unbind()]),
        "tolist": lambda m, x: m(x) * sum(x.mean(0).tolist()),
        "bool of a comparison": lambda m, x: m(x) * bool(x.mean() > 0),
        "the index of the largest": lambda m, x: m(x) * (1 + int(x.sum(0).argmax())),
        "a slice as long as the batch says": lambda m, x: m(x)[:, : int((x > 0).any(0).sum())].sum(1),
        "rolled by a count": lambda m, x: m(x).roll(int((x > 0).sum()), 1),
        "numpy's maximum": lambda m, x: m(x) * float(x.detach().numpy().max()),
        "std by item": lambda m, x: (m(x) - x.mean().item()) / (x.std().item() + 1e-5),
    },
)
