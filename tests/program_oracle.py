"""A random program as a model with inputs, and the truth about it: a loop over its single samples."""

from __future__ import annotations

import linecache
import sys
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxgrad.testing import relative_error
from tests.program_builder import VOCABULARY, Layout

Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Input:
    """One argument: its shape with the batch left out as 1, its batch dim (None: shared), whether it holds ids."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    integer: bool = False

    def sample(self, batch: int, generator: torch.Generator) -> Tensor:
        shape = [batch if d == self.dim else size for d, size in enumerate(self.shape)]
        if self.integer:
            return torch.randint(VOCABULARY, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Program:
    """A model in source form, its inputs, and where the samples are in its outputs."""

    seed: int
    size: int
    batch: int
    source: str
    inputs: tuple[Input, ...]
    outputs: tuple[Layout | None, ...]  # None: a 0-dim loss, a sum over samples
    mixes: bool  # by construction

    @property
    def in_dims(self) -> tuple[int | None, ...]:
        return tuple(x.dim for x in self.inputs)

    def model(self) -> nn.Module:
        """A new module with parameters and buffers drawn from the seed."""
        model: nn.Module = load(f"program_{self.seed}_{self.size}", self.source)().double()
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point():
                    drawn = 0.6 * torch.randn(
                        tensor.shape, generator=generator, dtype=torch.float64
                    )
                    tensor.copy_(drawn.abs() + 0.5 if "running_var" in name else drawn)
        return model

    def sample(self, batch: int) -> list[Tensor]:
        """Arguments for a batch of this size."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [x.sample(batch, generator) for x in self.inputs]


@lru_cache(maxsize=32)
def load(name: str, source: str) -> type[nn.Module]:
    """The class Model of a source text, in a module of its own: stack traces show its lines, Dynamo its globals."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    module = ModuleType(name)
    vars(module).update(torch=torch, nn=nn, F=F, checkpoint=checkpoint)
    sys.modules[name] = module
    exec(compile(source, filename, "exec"), vars(module))
    loaded.append(name)
    if len(loaded) > 64:
        sys.modules.pop(loaded.popleft(), None)
    model: type[nn.Module] = module.Model
    return model


loaded: deque[str] = deque()


def loss_of(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A sum over samples: a 0-dim output is a loss already, every other one is summed behind a nonlinear function."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.stack(
        [out if out.dim() == 0 else (out.sin() * 1.3).sum() for out in outputs]
    ).sum()


@dataclass(frozen=True)
class Truth:
    """The loop over single samples: outputs, gradients of trainable parameters [B, ...] and of the first input."""

    outputs: list[tuple[Tensor, ...]]
    grads: Grads
    input_grads: list[Tensor]


def loop(program: Program, model: nn.Module, args: list[Tensor], batch: int) -> Truth:
    """Run the model on each sample alone, its batch dim kept with size 1."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads: dict[str, list[Tensor]] = {name: [] for name in trainable}
    outputs, input_grads = [], []
    for i in range(batch):
        single = [
            x if dim is None else x.narrow(dim, i, 1)
            for x, dim in zip(args, program.in_dims, strict=True)
        ]
        single[0] = single[0].detach().requires_grad_()
        out = model(*single)
        outputs.append(tuple(o.detach() for o in ((out,) if isinstance(out, Tensor) else out)))
        found = torch.autograd.grad(
            loss_of(out), [single[0], *trainable.values()], allow_unused=True
        )
        input_grads.append(torch.zeros_like(single[0]) if found[0] is None else found[0])
        for (name, p), g in zip(trainable.items(), found[1:], strict=True):
            grads[name].append(torch.zeros_like(p) if g is None else g)
    stacked = {
        n: torch.stack(g) if g else p.new_zeros(0, *p.shape)
        for (n, p), g in zip(trainable.items(), grads.values(), strict=True)
    }
    return Truth(outputs, stacked, input_grads)


def sample_of(out: Tensor, layout: Layout, batch: int, i: int) -> Tensor:
    """Sample i of a batched value, as the model returns it for that sample alone."""
    d, outer, inner = layout
    split = out.reshape(*out.shape[:d], outer, batch, inner, *out.shape[d + 1 :])
    return split.narrow(d + 1, i, 1).reshape(*out.shape[:d], outer * inner, *out.shape[d + 1 :])


def forward_error(
    program: Program, outputs: Tensor | tuple[Tensor, ...], truth: Truth, batch: int
) -> float:
    """The largest difference between a batch's outputs and the single samples' outputs."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    worst = 0.0
    for k, (out, layout) in enumerate(zip(outputs, program.outputs, strict=True)):
        if layout is None:
            pairs = [(out, torch.stack([single[k] for single in truth.outputs]).sum())]
        else:
            pairs = [(sample_of(out, layout, batch, i), truth.outputs[i][k]) for i in range(batch)]
        for a, b in pairs:
            if a.shape != b.shape:
                return float("inf")
            worst = max(
                worst,
                float((a - b).abs().max()) / max(1.0, float(b.abs().max())) if a.numel() else 0.0,
            )
    return worst


def grad_error(found: Grads, truth: Grads) -> float:
    """`relative_error`, infinite where shapes differ or a value is not finite."""
    try:
        return relative_error(found, truth)
    except AssertionError:
        return float("inf")


def mixes_by_oracle(program: Program) -> bool:
    """Whether the batch's forward differs from the single samples' forwards."""
    model, args = program.model(), program.sample(program.batch)
    with torch.no_grad():
        outputs = model(*args)
    return (
        forward_error(program, outputs, loop(program, model, args, program.batch), program.batch)
        > 1e-7
    )
