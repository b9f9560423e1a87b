"""A way of computing per-sample gradients as a step that can be run again and again.

An engine owns copies of the model and of the batch: hooks, attributes and marks that one library
leaves on a tensor never reach the plain step it is compared with.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.tasks import Quantity, Task

NORMS = "norms"  # the name of quantity N's one result, [B]
EPSILON = 1e-6  # min(1, C / (n + EPSILON)), as in Opacus

Results = dict[str, Tensor]


class CannotError(Exception):
    """This peer does not compute this quantity, or not on this machine."""


@dataclass(frozen=True)
class Engine:
    """`step` is one whole training step and begins with `clear`; `results` is what it left.

    G: parameter -> [B, *shape]. N: NORMS -> [B]. C: parameter -> shape.
    """

    step: Callable[[], None]
    clear: Callable[[], None]
    results: Callable[[], Results]
    peak: Callable[[], int] | None = None  # bytes, where the memory is not torch's
    weights: Callable[[], Tensor] | None = None  # [B]: what C multiplied each sample's gradient by, where it tells


def copies(task: Task) -> tuple[nn.Module, Tensor, Tensor]:
    return copy.deepcopy(task.model), task.x.clone(), task.y.clone()


def reduce_grads(quantity: Quantity, grads: Mapping[str, Tensor], max_grad_norm: float) -> Results:
    """Make N or C of the per-sample gradients of all parameters."""
    if quantity == "G":
        return dict(grads)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    if quantity == "N":
        return {NORMS: norms}
    factors = (max_grad_norm / (norms + EPSILON)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in grads.items()}


def grad_sample_engine(
    task: Task,
    quantity: Quantity,
    params: Mapping[str, nn.Parameter],
    backward: Callable[[], None],
) -> Engine:
    """An engine whose `backward` leaves p.grad_sample; other quantities are made of it eagerly."""
    results: Results = {}

    def clear() -> None:
        results.clear()
        for p in params.values():
            p.grad = None
            p.grad_sample = None  # type: ignore[attr-defined]

    def step() -> None:
        clear()
        backward()
        grads = {name: p.grad_sample for name, p in params.items()}  # type: ignore[attr-defined]
        results.update(reduce_grads(quantity, grads, task.max_grad_norm))

    return Engine(step, clear, lambda: results)
