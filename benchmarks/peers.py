"""Each way of computing per-sample gradients, as a step that can be run again and again.

An engine owns copies of the model and of the batch: hooks, attributes and marks that one library
leaves on a tensor never reach the plain step it is compared with.
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import Task, Training, loss


@dataclass(frozen=True)
class Engine:
    """`step` is one whole training step and begins with `clear`; `grads` is what it left."""

    step: Callable[[], None]
    clear: Callable[[], None]
    grads: Callable[[], dict[str, Tensor]]


def plain(task: Task) -> Engine:
    """The ordinary compiled step, the denominator of every ratio."""
    model, x, y = _copies(task)
    return _backward_engine(model, torch.compile(Training(model), backend=task.backend), x, y)


def fxgrad(task: Task) -> Engine:
    """This project, compiled by the same compiler as the plain step."""
    transform = importlib.import_module("fxgrad").transform
    model, x, y = _copies(task)
    return _backward_engine(model, transform(Training(model), backend=task.backend), x, y)


def opacus(task: Task) -> Engine:
    """Opacus' hooks, which compute p.grad as well."""
    grad_sample_module = importlib.import_module("opacus").GradSampleModule
    model, x, y = _copies(task)
    hooked = grad_sample_module(model, loss_reduction="sum")
    return _backward_engine(model, lambda x, y: loss(hooked(x), y), x, y)


def expanded_weights(task: Task) -> Engine:
    """PyTorch's own tensor subclass."""
    name = "torch.nn.utils._per_sample_grad"
    call_for_per_sample_grads = importlib.import_module(name).call_for_per_sample_grads
    model, x, y = _copies(task)
    call = call_for_per_sample_grads(model, loss_reduction="sum")
    return _backward_engine(model, lambda x, y: loss(call(x), y), x, y)


def vmap(task: Task) -> Engine:
    """torch.func's vmap(grad), eager."""
    return _vmap_engine(task, lambda f: f)


def vmap_compiled(task: Task) -> Engine:
    """torch.func's vmap(grad), compiled."""
    return _vmap_engine(task, lambda f: torch.compile(f, backend=task.backend))


PEERS: dict[str, Callable[[Task], Engine]] = {
    "fxgrad": fxgrad,
    "opacus": opacus,
    "expanded_weights": expanded_weights,
    "vmap": vmap,
    "vmap_compiled": vmap_compiled,
}


def fxgrad_pass_seconds() -> float | None:
    """Seconds fxgrad's own passes took in this process; None where fxgrad does not tell."""
    try:
        seconds = importlib.import_module("fxgrad.pipeline").seconds
    except (ImportError, AttributeError):
        return None
    return float(sum(seconds.values()))


def _copies(task: Task) -> tuple[nn.Module, Tensor, Tensor]:
    return copy.deepcopy(task.model), task.x.clone(), task.y.clone()


def _backward_engine(
    model: nn.Module, compute_loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> Engine:
    """An engine that calls backward and finds its results on the parameters."""
    params = dict(model.named_parameters())

    def clear() -> None:
        for p in params.values():
            p.grad = None
            p.grad_sample = None  # type: ignore[attr-defined]

    def step() -> None:
        clear()
        torch.autograd.backward(compute_loss(x, y))

    def grads() -> dict[str, Tensor]:
        return {name: p.grad_sample for name, p in params.items()}  # type: ignore[attr-defined]

    return Engine(step, clear, grads)


PerSample = Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]


def _vmap_engine(task: Task, compile_: Callable[[PerSample], PerSample]) -> Engine:
    """An engine that is a function from parameters to their per-sample gradients."""
    model, x, y = _copies(task)
    params = {name: p.detach() for name, p in model.named_parameters()}
    results: dict[str, Tensor] = {}

    def sample_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, params, (x[None],)), y[None])

    per_sample = compile_(torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0)))

    def step() -> None:
        results.clear()
        results.update(per_sample(params, x, y))

    return Engine(step, results.clear, lambda: results)
