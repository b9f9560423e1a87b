"""A random program as a model with inputs, and the truth about it: a loop over its single samples."""

from __future__ import annotations

import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxgrad.testing import relative_error
from tests.independence import with_one_changed
from tests.steps.attacks import PROGRAMS
from tests.steps.builder import VOCABULARY, Layout
from tests.steps.expected import Expected
from tests.steps.prelude import NAMES

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
    expected: Expected
    ending: bool = False  # its `ending` makes the outputs of what its `body` returns, and samples may meet there
    steps: tuple[str, ...] = ()

    @property
    def in_dims(self) -> tuple[int | None, ...]:
        return tuple(x.dim for x in self.inputs)

    def model(self) -> nn.Module:
        """A new module with parameters and buffers drawn from the seed."""
        model: nn.Module = load(f"program_{crc32(self.source.encode()):08x}", self.source)().double()
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point():
                    drawn = 0.6 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
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
    vars(module).update(NAMES, torch=torch, nn=nn, F=F, ATTACKS=PROGRAMS)
    sys.modules[name] = module
    exec(compile(source, filename, "exec"), vars(module))
    loaded.append(name)
    if len(loaded) > 64 and (oldest := loaded.popleft()) not in loaded:
        sys.modules.pop(oldest, None)
    model: type[nn.Module] = module.Model
    return model


loaded: deque[str] = deque()


def tuple_of(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def loss_of(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A sum over samples: a 0-dim output is a loss already, every other one is summed behind a nonlinear function."""
    return torch.stack([out if out.dim() == 0 else (out.sin() * 1.3).sum() for out in tuple_of(outputs)]).sum()


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """The buffers hold at the end what they held at the beginning."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, values in before:
            buffer.detach().copy_(values)


class NotAlone(Exception):
    """The model raises an error on a single sample: no gradient is that sample's own."""


@dataclass(frozen=True)
class Truth:
    """The loop over single samples: outputs, gradients of trainable parameters [B, ...] and of the first input."""

    outputs: list[tuple[Tensor, ...]]
    grads: Grads
    input_grads: list[Tensor]


def loop(program: Program, model: nn.Module, args: list[Tensor], batch: int) -> Truth:
    """Run the model on each sample alone, its batch dim kept with size 1."""

    def outputs_of(i: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        single = single_of(program, args, i)
        return single, tuple_of(model(*single))

    return truth_by(model, batch, outputs_of)


def shares(program: Program, model: nn.Module, args: list[Tensor], batch: int) -> Truth:
    """Run the body on each sample alone, and the ending on all samples, with a gradient for this one only."""
    with torch.no_grad(), restored(model):
        parts = [tuple_of(model.body(*single_of(program, args, i))) for i in range(batch)]  # type: ignore[operator]

    def outputs_of(i: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        single = single_of(program, args, i)
        own = [*parts[:i], tuple_of(model.body(*single)), *parts[i + 1 :]]  # type: ignore[operator]
        whole = [side_by_side([part[k] for part in own], layout) for k, layout in enumerate(program.outputs)]
        return single, tuple_of(model.ending(*whole))  # type: ignore[operator]

    return truth_by(model, batch, outputs_of)


def single_of(program: Program, args: list[Tensor], i: int) -> list[Tensor]:
    """The arguments of sample i alone, the first one with a gradient."""
    pairs = zip(args, program.in_dims, strict=True)
    single = [x if dim is None else x.narrow(dim, i, 1) for x, dim in pairs]
    return [single[0].detach().requires_grad_(), *single[1:]]


def side_by_side(parts: list[Tensor], layout: Layout | None) -> Tensor:
    """The value of a batch from those of its samples."""
    if layout is None:
        return torch.stack(parts).sum()
    d, outer, inner = layout
    shape = parts[0].shape
    split = [part.reshape(*shape[:d], outer, 1, inner, *shape[d + 1 :]) for part in parts]
    return torch.cat(split, d + 1).flatten(d, d + 2)


def truth_by(
    model: nn.Module, batch: int, outputs_of: Callable[[int], tuple[list[Tensor], tuple[Tensor, ...]]]
) -> Truth:
    """What plain autograd gives for one sample after the other, each from the same buffers."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads: dict[str, list[Tensor]] = {name: [] for name in trainable}
    outputs, input_grads = [], []
    for i in range(batch):
        with restored(model):
            try:
                single, out = outputs_of(i)
            except Exception as error:  # whatever the op objects to
                raise NotAlone(str(error)) from error
            outputs.append(tuple(o.detach() for o in out))
            tensors = [single[0], *trainable.values()]
            found = gradients(loss_of(out), tensors)
        input_grads.append(found[0])
        for name, g in zip(trainable, found[1:], strict=True):
            grads[name].append(g)
    stacked = {
        n: torch.stack(g) if g else p.new_zeros(0, *p.shape)
        for (n, p), g in zip(trainable.items(), grads.values(), strict=True)
    }
    return Truth(outputs, stacked, input_grads)


def gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Plain autograd's, zeros where there is none."""
    if not loss.requires_grad:
        return [torch.zeros_like(t) for t in tensors]
    return list(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True))


def sample_of(out: Tensor, layout: Layout, batch: int, i: int) -> Tensor:
    """Sample i of a batched value, as the model returns it for that sample alone."""
    d, outer, inner = layout
    split = out.reshape(*out.shape[:d], outer, batch, inner, *out.shape[d + 1 :])
    return split.narrow(d + 1, i, 1).reshape(*out.shape[:d], outer * inner, *out.shape[d + 1 :])


def forward_error(program: Program, outputs: tuple[Tensor, ...], truth: Truth, batch: int) -> float:
    """The largest difference between a batch's outputs and the single samples' outputs."""
    worst = 0.0
    for k, (out, layout) in enumerate(zip(outputs, program.outputs, strict=True)):
        if layout is None:
            pairs = [(out, torch.stack([single[k] for single in truth.outputs]).sum())]
        else:
            pairs = [(sample_of(out, layout, batch, i), truth.outputs[i][k]) for i in range(batch)]
        worst = max([worst, *(difference(a, b) for a, b in pairs)])
    return worst


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to b, infinite where shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max()) / max(1.0, float(b.abs().max())) if a.numel() else 0.0


def grad_error(found: Grads, truth: Grads) -> float:
    """`relative_error`, infinite where shapes differ or a value is not finite."""
    try:
        return relative_error(found, truth)
    except AssertionError:
        return float("inf")


def whole_gradients(model: nn.Module, args: list[Tensor]) -> Grads:
    """Plain autograd on the batch: the gradients of trainable parameters, and of the first input as `x0`."""
    first = args[0].detach().requires_grad_()
    tensors = {"x0": first, **{name: p for name, p in model.named_parameters() if p.requires_grad}}
    with restored(model):
        found = gradients(loss_of(model(first, *args[1:])), list(tensors.values()))
    return dict(zip(tensors, found, strict=True))


def sum_of(program: Program, truth: Truth) -> Grads:
    """The batch's gradients, if they are those of the single samples."""
    of_input = torch.cat(truth.input_grads, program.inputs[0].dim or 0)
    return {"x0": of_input, **{name: g.sum(0) for name, g in truth.grads.items()}}


def mixes_by_oracle(program: Program) -> bool:
    """Whether the single samples' forwards or gradients are not the batch's, or move when another sample is changed."""
    model, args = program.model(), program.sample(program.batch)
    try:
        truth = loop(program, model, args, program.batch)
    except NotAlone:
        return True
    outputs = forward(model, args)
    if forward_error(program, outputs, truth, program.batch) > 1e-7:
        return True
    whole = whole_gradients(model, args)
    if all(g.isfinite().all() for g in whole.values()) and grad_error(whole, sum_of(program, truth)) > 1e-7:
        return True
    last = program.batch - 1
    changed = forward(model, with_one_changed(args, program.in_dims, last))
    return any(
        difference(sample_of(b, layout, program.batch, i), sample_of(a, layout, program.batch, i)) > 1e-7
        for a, b, layout in zip(outputs, changed, program.outputs, strict=True)
        if layout is not None and b.isfinite().all()
        for i in range(last)
    )


def forward(model: nn.Module, args: list[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad(), restored(model):
        return tuple_of(model(*args))
