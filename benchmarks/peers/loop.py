"""A microbatch loop: the ordinary step, one sample at a time."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.engine import EPSILON, NORMS, Engine, Results, copies
from benchmarks.tasks import Quantity, Task, Training


def microbatch(task: Task, quantity: Quantity) -> Engine:
    """Compiled for one sample, as the ordinary step is for the batch."""
    model, x, y = copies(task)
    training: Callable[..., Any] = Training(model, task.losses)
    if task.compiled:
        training = torch.compile(training, backend=task.backend)
    params, limit = dict(model.named_parameters()), task.max_grad_norm
    results: Results = {}

    def clear() -> None:
        results.clear()
        model.zero_grad(set_to_none=True)

    def collect(i: int) -> None:
        norm = torch.stack([p.grad.norm() for p in params.values() if p.grad is not None]).norm()
        if quantity == "N":
            results[NORMS][i] = norm
            return
        factor = (limit / (norm + EPSILON)).clamp(max=1)
        for name, p in params.items():
            assert p.grad is not None
            results[name].addcmul_(p.grad, factor)

    def step() -> None:
        clear()
        if quantity == "N":
            results[NORMS] = x.new_empty(len(x), dtype=torch.float32)
        elif quantity == "C":
            results.update({name: torch.zeros_like(p) for name, p in params.items()})
        else:
            results.update({name: p.new_empty(len(x), *p.shape) for name, p in params.items()})
        for i in range(len(x)):
            model.zero_grad(set_to_none=True)
            training(x[i : i + 1], y[i : i + 1]).backward()
            if quantity != "G":
                collect(i)
                continue
            for name, p in params.items():
                assert p.grad is not None
                results[name][i].copy_(p.grad)

    return Engine(step, clear, lambda: {name: value.detach() for name, value in results.items()})
