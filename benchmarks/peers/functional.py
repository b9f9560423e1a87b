"""torch.func's vmap(grad): a function from parameters to their per-sample gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.engine import Engine, Results, copies, reduce_grads
from benchmarks.tasks import Quantity, Task

Compute = Callable[[Results, Tensor, Tensor], Results]


def vmap(task: Task, quantity: Quantity) -> Engine:
    """Eager."""
    return _engine(task, quantity, lambda f: f)


def vmap_compiled(task: Task, quantity: Quantity) -> Engine:
    """Compiled, with what is made of the gradients."""
    return _engine(task, quantity, lambda f: torch.compile(f, backend=task.backend))


def _engine(task: Task, quantity: Quantity, compile_: Callable[[Compute], Compute]) -> Engine:
    model, x, y = copies(task)
    params = {name: p.detach() for name, p in model.named_parameters()}
    limit = task.max_grad_norm
    results: Results = {}

    def sample_loss(params: Results, x: Tensor, y: Tensor) -> Tensor:
        return task.losses(torch.func.functional_call(model, params, (x[None],)), y[None]).sum()

    per_sample = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0))
    compute = compile_(lambda params, x, y: reduce_grads(quantity, per_sample(params, x, y), limit))

    def step() -> None:
        results.clear()
        results.update(compute(params, x, y))

    return Engine(step, results.clear, lambda: results)
