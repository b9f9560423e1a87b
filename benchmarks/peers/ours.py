"""The ordinary step, compiled and eager, and fxgrad behind the same compiler."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.engine import NORMS, CannotError, Engine, Results, copies
from benchmarks.tasks import Quantity, Task, Training


def plain(task: Task, compiled: bool = True) -> Engine:
    """The ordinary step: forward, summed loss, backward."""
    model, x, y = copies(task)
    training: Callable[..., Any] = Training(model, task.losses)
    if compiled and task.compiled:
        training = torch.compile(training, backend=task.backend)
    params = dict(model.named_parameters())

    def clear() -> None:
        model.zero_grad(set_to_none=True)

    def step() -> None:
        clear()
        training(x, y).backward()

    return Engine(step, clear, lambda: {name: p.grad for name, p in params.items() if p.grad is not None})


def fxgrad(task: Task, quantity: Quantity, whole: bool = False) -> Engine:
    """This project, each quantity by one backward; or the whole step as one graph."""
    library = importlib.import_module("fxgrad")
    kind = _kind(library, quantity, task.max_grad_norm)
    model, x, y = copies(task)
    training = library.transform(Training(model, task.losses), quantity=kind, backend=task.backend)
    forward_backward = library.forward_backward(training, Training.forward) if whole else None
    params = dict(model.named_parameters())
    found: Results = {}

    def clear() -> None:
        found.clear()
        library.zero_grad(training)

    def step() -> None:
        clear()
        if forward_backward is not None:
            forward_backward(x, y)
        else:
            training(x, y).backward()
        if quantity == "N":
            found[NORMS] = library.result(training, kind)

    def results() -> Results:
        if quantity == "N":
            return found
        attribute = "grad_sample" if quantity == "G" else "grad"
        return {name: getattr(p, attribute) for name, p in params.items()}

    def weights() -> torch.Tensor:
        weight: torch.Tensor = library.result(training, kind).weight
        return weight

    return Engine(step, clear, results, weights=weights if quantity == "C" else None)


def forward_backward(task: Task, quantity: Quantity) -> Engine:
    """This project's whole step as one graph."""
    return fxgrad(task, quantity, whole=True)


def pass_seconds() -> float | None:
    """Seconds fxgrad's own passes took in this process; None where fxgrad does not tell."""
    try:
        seconds = importlib.import_module("fxgrad.compile.pipeline").seconds
    except (ImportError, AttributeError):
        return None
    return float(sum(seconds.values()))


def _kind(library: Any, quantity: Quantity, max_grad_norm: float) -> Any:
    name = {"G": "GradSample", "N": "NormSample", "C": "ClippedGrad"}[quantity]
    kind = getattr(library, name, None)
    if kind is None:
        raise CannotError(f"this fxgrad has no {name}")
    return kind(max_grad_norm=max_grad_norm) if quantity == "C" else kind()
