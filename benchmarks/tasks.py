"""One training step to measure: a model, a batch, a loss summed over samples, and the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# G: the gradient of each sample, for all parameters. N: each sample's gradient norm over all
# parameters. C: Σ_i min(1, C / (n_i + 1e-6)) g_i, the sum that differentially private training uses.
Quantity = Literal["G", "N", "C"]
QUANTITIES: tuple[Quantity, ...] = ("G", "N", "C")

Losses = Callable[[Tensor, Tensor], Tensor]  # the model's output and the targets -> [B]


@dataclass(frozen=True)
class Spec:
    """How a task is made, and what is known about peers that cannot do it."""

    build: Callable[[], nn.Module]
    batch: int
    data: Callable[[int], tuple[Tensor, Tensor]]
    losses: Losses
    compiled: bool = True  # False: Dynamo leaves its layers alone (recurrent ones), so the plain step is eager
    cannot: Mapping[str, str] = field(default_factory=dict)  # peer -> why; it is tried all the same


@dataclass(frozen=True)
class Task:
    """A model with its batch, ready to be stepped."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    losses: Losses
    backend: str = "inductor"
    compiled: bool = True

    @property
    def grad_sample_bytes(self) -> int:
        """B * |P| * itemsize: what the per-sample gradients of all parameters occupy."""
        per_sample = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return len(self.x) * per_sample

    @cached_property
    def max_grad_norm(self) -> float:
        """The median norm of the first samples' gradients, so that some are clipped and some are not."""
        training, norms = Training(self.model, self.losses), []
        for i in range(min(5, len(self.x))):
            loss = training(self.x[i : i + 1], self.y[i : i + 1])
            grads = torch.autograd.grad(loss, list(self.model.parameters()))
            norms.append(torch.stack([g.norm() for g in grads]).norm())
        return float(torch.stack(norms).median())


class Training(nn.Module):
    """The model and its summed loss as one module, so that both are compiled."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model = model
        self.losses = losses

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.losses(self.model(x), y).sum()
        return loss


def class_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of each sample's one class."""
    return F.cross_entropy(logits, y, reduction="none")


def token_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of each sample's tokens, summed over its positions."""
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return losses.view(y.shape).sum(1)


def square_losses(output: Tensor, y: Tensor) -> Tensor:
    """Half the squared distance of each sample's output from y."""
    return 0.5 * (output - y).square().flatten(1).sum(1)


def vectors(*shape: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of normal numbers and one class for each sample."""
    return lambda batch: (torch.randn(batch, *shape), torch.randint(classes, (batch,)))


def regressions(shape: tuple[int, ...], out: tuple[int, ...]) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of normal numbers and normal targets."""
    return lambda batch: (torch.randn(batch, *shape), torch.randn(batch, *out))


def texts(length: int, words: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of token ids and one class for each sample."""
    return lambda batch: (torch.randint(words, (batch, length)), torch.randint(classes, (batch,)))


def next_words(length: int, words: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of token ids and the id that follows each."""

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(words, (batch, length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return draw


def make_task(name: str, spec: Spec, device: str, backend: str = "inductor", seed: int = 0) -> Task:
    """The model with random weights and a random batch, the same for every seed."""
    torch.manual_seed(seed)
    model = spec.build()
    x, y = _decided_batch(model, spec)
    return Task(name, model.to(device), x.to(device), y.to(device), spec.losses, backend, spec.compiled)


def _decided_batch(model: nn.Module, spec: Spec, chunks: int = 25) -> tuple[Tensor, Tensor]:
    """A batch of samples whose gradient rounding cannot change by much."""
    if not any(isinstance(module, nn.ReLU | nn.MaxPool2d) for module in model.modules()):
        return spec.data(spec.batch)
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for _ in range(chunks):
        x, y = spec.data(spec.batch)
        decided = are_decided(model, x)
        xs.append(x[decided])
        ys.append(y[decided])
        if sum(map(len, xs)) >= spec.batch:
            return torch.cat(xs)[: spec.batch], torch.cat(ys)[: spec.batch]
    raise AssertionError("too few samples whose gradient rounding cannot change")


def are_decided(model: nn.Module, x: Tensor, margin: float = 4e-6) -> Tensor:
    """Which samples keep every ReLU's input clear of zero, and every window's two largest values apart.

    The margin is in units of the root mean square. Of the 114,688 inputs of a sample of CNN-6 one often lies
    so near zero that rounding decides its sign. The gradient then is another one, off by 1e-3, and equally right.
    """
    model = copy.deepcopy(model).double()
    decided = torch.ones(len(x), dtype=torch.bool)

    def check_relu(_: nn.Module, inputs: tuple[Tensor]) -> None:
        z = inputs[0].flatten(1)
        decided.logical_and_(z.abs().amin(1) > margin * z.square().mean(1).sqrt())

    def check_pool(pool: nn.MaxPool2d, inputs: tuple[Tensor]) -> None:
        (z,) = inputs
        size, stride = pool.kernel_size, pool.stride
        assert isinstance(size, int) and isinstance(stride, int)
        windows = z.unfold(2, size, stride).unfold(3, size, stride)
        first, second = windows.flatten(-2).topk(2).values.flatten(1, -2).unbind(-1)
        gap = torch.where(first == 0, torch.inf, first - second)  # behind a ReLU; no gradient goes further
        decided.logical_and_(gap.amin(1) > margin * z.flatten(1).square().mean(1).sqrt())

    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(check_relu)
        elif isinstance(module, nn.MaxPool2d):
            module.register_forward_pre_hook(check_pool)
    with torch.no_grad():
        model(x.double() if x.is_floating_point() else x)
    return decided
