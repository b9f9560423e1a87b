"""The witness: runs of the plain model on the whole batch, on single samples, and with one sample changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.host.dispatch import TorchDispatchMode
from fxgrad.kernels.precision import wide
from fxgrad.samples.batch import SHARED, Batch, map_tensors, tensors_in
from fxgrad.samples.layouts import Layout, samples_first
from fxgrad.verification.oracle import default_loss, largest, state_restored

SEED = 0  # of every forward, so that all draw the same random numbers

Nest = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call, with the sample dims of their tensors."""

    nest: Nest
    batch: Batch

    def fresh(self) -> Nest:
        """Copy the arguments, so that a model may change them in place."""
        return self._map(lambda x, dim: x)

    def sample(self, i: int) -> Nest:
        """Return sample i alone."""
        return self._map(lambda x, dim: x if dim == SHARED else x.narrow(dim, i, 1))

    def changed(self, i: int) -> Nest:
        """Return the batch with sample i changed."""
        return self._map(lambda x, dim: x if dim == SHARED else _changed(x, dim, i))

    def _map(self, function: Callable[[Tensor, int], Tensor]) -> Nest:
        def copy(x: Tensor) -> Tensor:
            value = function(x.detach(), self.batch.dims.get(id(x), SHARED))
            return value.clone().requires_grad_(x.requires_grad)

        nest: Nest = map_tensors(self.nest, copy)
        return nest


def _changed(x: Tensor, dim: int, i: int) -> Tensor:
    """Change sample i of x: towards its neighbour for floating values, else to the neighbour's values."""
    old, other = x.select(dim, i), x.select(dim, (i + 1) % x.shape[dim])
    if x.is_floating_point() or x.is_complex():
        new = old + 0.7 * (other - old)
        new = torch.where(new.isfinite(), new, other)
        new = old * 1.1 + 0.1 if torch.equal(new, old) else new
    else:
        new = old.flip(-1) if old.dim() and torch.equal(old, other) else other
    result = x.clone()
    result.select(dim, i).copy_(new)
    return result


@dataclass
class Whole:
    """One forward and backward of the whole batch."""

    outputs: list[Tensor]
    by_output: list[Tensor | None]  # the loss's gradient by each output
    grads: dict[str, Tensor | None]  # by each parameter; None if the loss does not depend on it
    draws: bool  # whether the model drew random numbers
    dtypes: set[torch.dtype]  # of all floating values that it computed


class Witness:
    """Runs of a model owned by the witness, each from the same state and random seed."""

    def __init__(self, model: nn.Module, inputs: Inputs, loss_fn: Callable[[Any], Tensor] | None) -> None:
        self.model, self.inputs, self.loss_fn = model, inputs, loss_fn
        self.n = inputs.batch.size
        self.tolerance = 0.0  # for a sample alone against its rows in the batch
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @contextmanager
    def forward(self, model: nn.Module, nest: Nest) -> Iterator[Any]:
        """Yield the model's output; restore the model's state on exit, after the backward."""
        args, kwargs = nest
        with state_restored(self.model), torch.enable_grad():
            torch.manual_seed(SEED)
            yield model(*args, **kwargs)

    def loss(self, output: Any) -> Tensor:
        """Return the user's loss of an output, or the default one; several losses are summed."""
        if self.loss_fn is None:
            return default_loss(tensors_in(output))
        loss = self.loss_fn(output)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn has to return a tensor, not {type(loss).__name__}")
        return loss.sum()

    def whole(self) -> Whole:
        """Run the plain model on the whole batch."""
        dtypes = _Dtypes()
        with dtypes, self.forward(self.model, self.inputs.fresh()) as output:
            after = _random_state(self.model)
            leaves = tensors_in(output)
            by_output = self.by_output(output)
            grads = self._grads(leaves, by_output)
        torch.manual_seed(SEED)
        before = _random_state(self.model)
        draws = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return Whole([leaf.detach().clone() for leaf in leaves], by_output, grads, draws, dtypes.found)

    def by_output(self, output: Any) -> list[Tensor | None]:
        """Return dL/dy for every tensor y of an output, as independent variables."""
        cut: list[Tensor] = []

        def leaf(y: Tensor) -> Tensor:
            cut.append(y.detach().clone().requires_grad_(y.requires_grad))
            return cut[-1]

        loss = self.loss(map_tensors(output, leaf))
        wrt = [y for y in cut if y.requires_grad]
        if not loss.requires_grad:
            return [None] * len(cut)
        grads = iter(torch.autograd.grad(loss, wrt, allow_unused=True))
        return [next(grads) if y.requires_grad else None for y in cut]

    def alone(self, whole: Whole, places: Sequence[Layout | None], scale: float) -> Iterator[dict[str, Tensor]]:
        """Yield each sample's gradients by a forward and a backward of that sample alone.

        Raise `NotAlone` if that forward does not give the sample's rows of the batch's outputs.
        """
        for i in range(self.n):
            with self.forward(self.model, self.inputs.sample(i)) as output:
                leaves = tensors_in(output)
                by_output = []
                for y, all_y, g, place in zip(leaves, whole.outputs, whole.by_output, places, strict=True):
                    if place is not None and not self._close(y.detach(), row(all_y, place, self.n, i)):
                        raise NotAlone(f"sample {i} alone has other outputs than in the batch")
                    by_output.append(g if place is None or g is None else row(g, place, self.n, i) * scale)
                yield _dense(self._grads(leaves, by_output), self.parameters)

    def within(self, whole: Whole, places: Sequence[Layout | None], scale: float) -> Iterator[dict[str, Tensor]]:
        """Yield each sample's gradients by one forward of the batch and a backward from that sample's outputs."""
        with self.forward(self.model, self.inputs.fresh()) as output:
            leaves = tensors_in(output)
            for i in range(self.n):
                by_output = []
                for g, place in zip(whole.by_output, places, strict=True):
                    by_output.append(g if place is None or g is None else _masked(g, place, self.n, i) * scale)
                yield _dense(self._grads(leaves, by_output), self.parameters)

    def _close(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and not bool(differs(a, b, self.tolerance).any())

    def _grads(self, leaves: Sequence[Tensor], by_output: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        pairs = [(y, g) for y, g in zip(leaves, by_output, strict=True) if g is not None]
        if not pairs or not self.parameters:
            return dict.fromkeys(self.parameters)
        outputs, grads = zip(*pairs, strict=True)
        grads_of_parameters = torch.autograd.grad(
            outputs, list(self.parameters.values()), grads, allow_unused=True, retain_graph=True
        )
        return dict(zip(self.parameters, grads_of_parameters, strict=True))


class NotAlone(Exception):
    """Raised if a sample alone has other outputs than in the batch, so the loop over samples is no reference."""


def _dense(grads: Mapping[str, Tensor | None], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameters[name]) if g is None else g.detach().to_dense() for name, g in grads.items()
    }


def _random_state(model: nn.Module) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + [torch.cuda.get_rng_state(device) for device in cuda_devices(model)]


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """Return the GPUs of a model's parameters."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(devices, key=str)


def row(value: Tensor, place: Layout, n: int, i: int) -> Tensor:
    """Return sample i's part of a value, in the shape for a single sample."""
    return samples_first(value, place, n)[i]


def _masked(g: Tensor, place: Layout, n: int, i: int) -> Tensor:
    """Return g with zeros for all samples but i."""
    positions = row(torch.arange(g.numel(), device=g.device).view(g.shape), place, n, i).flatten()
    result = torch.zeros_like(g, memory_format=torch.contiguous_format)
    result.view(-1)[positions] = g.reshape(-1)[positions]
    return result


def differs(a: Tensor, b: Tensor, tolerance: float | None = None) -> Tensor:
    """Return a mask of elements that differ by more than rounding, or than a share of the largest."""
    if not (b.is_floating_point() or b.is_complex()):
        return a != b
    allowed = (4 * torch.finfo(b.dtype).eps if tolerance is None else tolerance) * largest(b)
    a, b = wide(a), wide(b)
    return ~((a == b) | ((a - b).abs() <= allowed) | (a.isnan() & b.isnan()))


class _Dtypes(TorchDispatchMode):
    """A dispatch mode that records the dtypes of all computed floating values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {value.dtype for value in tensors_in(result) if value.is_floating_point()}
        return result
