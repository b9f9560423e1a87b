"""The truth for the frameworks' tests: single samples by plain autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def classified(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def loop_rows(model: nn.Module, x: Tensor, y: Tensor, loss: Loss = classified) -> dict[str, Tensor]:
    """Return each sample's own gradient by every trainable parameter, ``[B, *p.shape]``, in float64."""
    twin = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    parameters = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(loss(twin, x[i : i + 1], y[i : i + 1]), list(parameters.values()), materialize_grads=True)
        for i in range(len(x))
    ]
    return {name: torch.stack(grads) for name, *grads in zip(parameters, *rows, strict=True)}


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)


def clipped_sum(rows: dict[str, Tensor], c: float) -> dict[str, Tensor]:
    weights = (c / norms_of(rows)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", weights, g) for name, g in rows.items()}
