"""BackPACK: BatchGrad, and BatchL2Grad with a second backward for the clipped sum."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.engine import (
    EPSILON,
    NORMS,
    CannotError,
    Engine,
    Results,
    copies,
    reduce_grads,
)
from benchmarks.tasks import Quantity, Task


def batch_grad(task: Task, quantity: Quantity) -> Engine:
    """p.grad_batch of every parameter; other quantities are made of it."""
    library, extension, model, x, y = _extended(task, "BatchGrad")
    found: Results = {}

    def clear() -> None:
        found.clear()
        _clear(model, "grad_batch")

    def step() -> None:
        clear()
        losses = task.losses(model(x), y)
        with library.backpack(extension):
            losses.sum().backward()
        found.update(reduce_grads(quantity, _saved(model, "grad_batch"), task.max_grad_norm))

    return Engine(step, clear, lambda: found)


def batch_l2(task: Task, quantity: Quantity) -> Engine:
    """p.batch_l2 of every parameter, the squared norms of the samples' gradients."""
    if quantity == "G":
        raise CannotError("BatchL2Grad computes no per-sample gradients")
    library, extension, model, x, y = _extended(task, "BatchL2Grad")
    found: Results = {}

    def clear() -> None:
        found.clear()
        _clear(model, "batch_l2")

    def step() -> None:
        clear()
        losses = task.losses(model(x), y)
        with library.backpack(extension, retain_graph=quantity == "C"):
            losses.sum().backward(retain_graph=quantity == "C")
        norms = torch.stack(list(_saved(model, "batch_l2").values())).sum(0).sqrt()
        if quantity == "N":
            found[NORMS] = norms
            return
        model.zero_grad(set_to_none=True)
        factors = (task.max_grad_norm / (norms + EPSILON)).clamp(max=1)
        (factors * losses).sum().backward()
        found.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    return Engine(step, clear, lambda: found)


def _extended(task: Task, name: str) -> tuple[Any, Any, nn.Module, Tensor, Tensor]:
    library = importlib.import_module("backpack")
    extension = getattr(importlib.import_module("backpack.extensions"), name)()
    model, x, y = copies(task)
    return library, extension, library.extend(model), x, y


def _saved(model: nn.Module, attribute: str) -> dict[str, Tensor]:
    saved = {name: getattr(p, attribute, None) for name, p in model.named_parameters()}
    if missing := [name for name, value in saved.items() if value is None]:
        raise CannotError(f"BackPACK left no {attribute} on {missing[0]}")
    return {name: value for name, value in saved.items() if value is not None}


def _clear(model: nn.Module, attribute: str) -> None:
    for p in model.parameters():
        p.grad = None
        if hasattr(p, attribute):
            delattr(p, attribute)
