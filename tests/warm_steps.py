"""Steps of a few models in a process of its own: prints a hash of their results, and what AOTAutograd's cache did.

``python -m tests.warm_steps`` with TORCHINDUCTOR_CACHE_DIR set. ``--save FILE`` writes the cache's artifacts to a file
after the steps, and ``--load FILE`` reads them before; ``--first N`` takes the first steps alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config

import fxgrad


class Norms(nn.Module):
    """A function of parameters, and an op with the generic rule, whose program the compiled graph looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(torch.randn(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(x * torch.cumprod(self.w.sigmoid(), 0))


class Clamped(torch.autograd.Function):
    """A function of the user's, with a backward that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g.clamp(-1, 1) * w, (2 * g * x).sum(0)


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return Clamped.apply(x, self.w)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def halved(norms: Tensor) -> Tensor:
    return 0.5 / (norms + 1)


class Row(NamedTuple):
    """A model, the shape of its input, a quantity; and whether `forward_backward` runs the step."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    quantity: Callable[[], fxgrad.Quantity]
    whole: bool = False


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


STEPS = [
    Row(perceptron, (6, 8), lambda: fxgrad.ClippedGrad(1.0)),
    Row(Norms, (6, 8), lambda: fxgrad.ClippedGrad(1.0, weights=halved)),
    Row(perceptron, (6, 8), lambda: fxgrad.ClippedGrad(0.5), whole=True),
    Row(Functions, (6, 8), fxgrad.GradSample),
    Row(perceptron, (6, 8), fxgrad.GradSample),
    Row(lambda: nn.Sequential(nn.Linear(8, 3)), (1, 8), fxgrad.GradSample),
    Row(encoder, (4, 5, 8), fxgrad.NormSample),
]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def step(row: Row) -> list[Tensor]:
    """Return all that one backward delivers."""
    torch.manual_seed(0)
    model, x, quantity = row.model(), torch.randn(row.shape), row.quantity()
    transformed = fxgrad.transform(model, quantity=quantity)
    if row.whole:
        fxgrad.forward_backward(transformed, loss_of)(x)
    else:
        loss_of(transformed, x).backward()
    of_parameters = [getattr(p, name, None) for p in model.parameters() for name in ("grad", "grad_sample")]
    result = None if isinstance(quantity, fxgrad.GradSample) else fxgrad.result(transformed, quantity)
    of_model = result if isinstance(result, tuple) else [result]
    return [value for value in (*of_parameters, *of_model) if isinstance(value, Tensor)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--first", type=int, default=len(STEPS))
    options = parser.parse_args()
    if options.load:
        torch.compiler.load_cache_artifacts(options.load.read_bytes())
    with config.patch(compile_threads=1):
        results = [step(row) for row in STEPS[: options.first]]
    if options.save:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        options.save.write_bytes(saved[0])
    hashes = [hashlib.sha256(b"".join(one.numpy().tobytes() for one in of)).hexdigest() for of in results]
    print(json.dumps({"results": hashes, **counters["aot_autograd"]}))


if __name__ == "__main__":
    main()
