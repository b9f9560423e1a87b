"""The models whose speed is gated, each with one batch of data and a loss summed over samples."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Task:
    """One training step to measure: a model, its batch and the compiler behind every engine."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    backend: str = "inductor"

    @property
    def grad_sample_bytes(self) -> int:
        """B * |P| * itemsize: what the per-sample gradients of all parameters occupy."""
        per_sample = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return len(self.x) * per_sample


class Training(nn.Module):
    """The model and its loss as one module, so that both are compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss(self.model(x), y)


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, summed over samples: each sample's gradient is then its own loss's."""
    return F.cross_entropy(logits, y, reduction="sum")


class Block(nn.Module):
    """A pre-norm transformer block: self-attention, then a perceptron four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        heads = F.scaled_dot_product_attention(
            q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)
        )
        x = x + self.out(heads.transpose(-2, -3).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """Blocks over a sequence of vectors, averaged over positions and classified."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(-2))
        return logits


def perceptron(*widths: int) -> nn.Module:
    """Linear layers of the given widths with a ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions(*stages: int) -> nn.Module:
    """Two 3x3 convolutions and an average pool for each stage, then a mean and a linear head."""
    layers: list[nn.Module] = []
    channels = 3
    for width in stages:
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.AvgPool2d(2))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return nn.Sequential(*layers, *head)


# name -> (model, batch size, shape of one sample)
MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "MLP-3": (lambda: perceptron(784, 512, 512, CLASSES), 128, (784,)),
    "CNN-6": (lambda: convolutions(32, 64, 128), 64, (3, 32, 32)),
    "TF-4": (lambda: Transformer(layers=4, width=256, heads=4), 32, (64, 256)),
}


def make_task(name: str, device: str, backend: str = "inductor", seed: int = 0) -> Task:
    """The named model with random weights and a random batch, the same for every seed."""
    build, batch, shape = MODELS[name]
    torch.manual_seed(seed)
    model = build()
    candidates = torch.randn(3 * batch, *shape)
    x = candidates[are_decided(model, candidates)][:batch].to(device)
    assert len(x) == batch, f"too few samples of {name} whose gradient rounding cannot change"
    y = torch.randint(CLASSES, (batch,)).to(device)
    return Task(name, model.to(device), x, y, backend)


def are_decided(model: nn.Module, x: Tensor, margin: float = 4e-6) -> Tensor:
    """Which samples keep every ReLU's input clear of zero, by `margin` of its root mean square.

    Of the 114,688 inputs of a sample of CNN-6 one often lies so near zero that rounding decides
    its sign. The gradient then is another one, off by 1e-3, and equally right.
    """
    model = copy.deepcopy(model).double()
    decided = torch.ones(len(x), dtype=torch.bool)

    def check(_: nn.Module, inputs: tuple[Tensor]) -> None:
        z = inputs[0].flatten(1)
        decided.logical_and_(z.abs().amin(1) > margin * z.square().mean(1).sqrt())

    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(check)
    with torch.no_grad():
        model(x.double())
    return decided
