"""The witness: runs of the plain model on the whole batch, on single samples, and with one sample changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.capture.shared_memory import converted, copies, entangled, once, sharing
from fxgrad.first_batch.changes import between
from fxgrad.first_batch.compared_rows import difference, largest
from fxgrad.host.dispatch import TorchDispatchMode
from fxgrad.host.tensors import version
from fxgrad.samples.batch import SHARED, Batch, map_tensors, tensors_in
from fxgrad.samples.layouts import Layout, samples_first
from fxgrad.untouched import cuda_devices
from fxgrad.verification.oracle import Grads, LossFn, default_loss, dense, gradients, state_restored

SEED = 0  # of every forward, so that all draw the same random numbers

Nest = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call, with the sample dims of their tensors."""

    nest: Nest
    batch: Batch
    written: set[int] = field(default_factory=set)  # the ids of the tensors that the model writes to

    def fresh(self) -> Nest:
        """Copy the arguments, so that a model may change them in place; what shares memory still does."""
        return self._put(copied_alike(self._tensors()))

    def sample(self, i: int) -> Nest:
        """Return sample i alone."""
        dims = self.batch.dims
        rows = {k: x.narrow(dims[k], i, 1) if dims.get(k, SHARED) != SHARED else x for k, x in self._tensors().items()}
        return self._put(copied_alike(rows))

    def changed(self, i: int) -> Nest:
        """Return the batch with sample i changed; in memory that the model writes to, also for others who share it."""
        tensors = self._tensors()
        shared = {k for group in sharing(tensors) if not self.written.isdisjoint(group) for k in group}
        new = {k: x.clone() for k, x in tensors.items() if k not in shared}
        new |= copied_alike({k: tensors[k] for k in shared})
        for k, x in tensors.items():
            dim = self.batch.dims.get(k, SHARED)
            if dim != SHARED:
                once(new[k].select(dim, i)).copy_(once(_changed(x, dim, i)))
        return self._put(new)

    def _tensors(self) -> dict[int, Tensor]:
        return {id(x): x.detach() for x in tensors_in(self.nest)}

    def _put(self, new: dict[int, Tensor]) -> Nest:
        nest: Nest = map_tensors(self.nest, lambda x: new[id(x)].requires_grad_(x.requires_grad))
        return nest


def copied_alike(tensors: dict[int, Tensor], *, double: bool = False) -> dict[int, Tensor]:
    """Copy tensors; those that share memory share the copies', and no other copy is a view."""
    together = entangled(tensors)
    new = copies({k: x for k, x in tensors.items() if k in together}, together, double=double)
    return new | {k: converted(x, double).clone() for k, x in tensors.items() if k not in together}


def _changed(x: Tensor, dim: int, i: int) -> Tensor:
    """Return new values of sample i of x: towards its neighbour for floating values, else to the neighbour's values."""
    old, other = x.select(dim, i), x.select(dim, (i + 1) % x.shape[dim])
    new = between(old, other)
    if torch.equal(new, old):
        new = old * 1.1 + 0.1 if new is not other else old.flip(-1) if old.dim() else old
    return new


@dataclass
class Whole:
    """One forward and backward of the whole batch."""

    outputs: list[Tensor]
    by_output: list[Tensor | None]  # the loss's gradient by each output
    grads: dict[str, Tensor | None]  # by each parameter; None if the loss does not depend on it
    draws: bool  # whether the model drew random numbers
    dtypes: set[torch.dtype]  # of all floating values that it computed
    places: list[Layout | None] = field(default_factory=list)  # the samples in each output, as `probe` saw them


class Witness:
    """Runs of a model owned by the witness, each from the same state and random seed."""

    def __init__(self, model: nn.Module, inputs: Inputs, loss_fn: LossFn | None, scale: float) -> None:
        self.model, self.inputs, self.loss_fn = model, inputs, loss_fn
        self.scale = scale  # of the gradients, in place of the loss
        self.n = inputs.batch.size
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
        dtypes, nest = _Dtypes(), self.inputs.fresh()
        copied = [(id(x), new, version(new)) for x, new in zip(*map(tensors_in, (self.inputs.nest, nest)), strict=True)]
        with dtypes, self.forward(self.model, nest) as output:
            self.inputs.written.update(k for k, new, before in copied if version(new) != before)
            after = _random_state(self.model)
            leaves = tensors_in(output)
            by_output = self.by_output(output)
            grads = gradients(leaves, self.parameters, by_output)
        torch.manual_seed(SEED)
        before = _random_state(self.model)
        draws = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return Whole([leaf.detach().clone() for leaf in leaves], by_output, grads, draws, dtypes.seen)

    def by_output(self, output: Any) -> list[Tensor | None]:
        """Return dL/dy for every tensor y of an output, as independent variables."""
        cut: list[Tensor] = []

        def leaf(y: Tensor) -> Tensor:
            cut.append(y.detach().clone().requires_grad_(y.requires_grad))
            return cut[-1]

        loss = self.loss(map_tensors(output, leaf))
        grads = gradients([loss], {k: y for k, y in enumerate(cut) if y.requires_grad})
        return [grads.get(k) for k in range(len(cut))]

    def alone(self, whole: Whole, tolerance: float) -> Grads:
        """Return the gradients of all samples, by a forward and a backward of each sample alone.

        Raise `NotAlone` if that forward does not give the sample's rows of the batch's outputs, up to a tolerance.
        """
        grads = []
        for i in range(self.n):
            with self.forward(self.model, self.inputs.sample(i)) as output:
                leaves = tensors_in(output)
                for y, all_y, place in zip(leaves, whole.outputs, whole.places, strict=True):
                    rows = y if place is None else row(all_y, place, self.n, i)
                    if y.shape != rows.shape or differs(y, rows, tolerance).any():
                        raise NotAlone(f"sample {i} alone has other outputs than in the batch")
                grads.append(self._backward(leaves, whole, partial(row, n=self.n, i=i)))
        return _stacked(grads)

    def within(self, whole: Whole) -> Grads:
        """Return the gradients of all samples, by one forward of the batch and a backward from each one's outputs."""
        with self.forward(self.model, self.inputs.fresh()) as output:
            leaves = tensors_in(output)
            return _stacked([self._backward(leaves, whole, partial(_masked, n=self.n, i=i)) for i in range(self.n)])

    def _backward(self, leaves: Sequence[Tensor], whole: Whole, part: Callable[[Tensor, Layout], Tensor]) -> Grads:
        """Return the gradients by one sample's part of the loss's gradient."""
        pairs = zip(whole.by_output, whole.places, strict=True)
        by_output = [g if place is None or g is None else part(g, place) * self.scale for g, place in pairs]
        return dense(gradients(leaves, self.parameters, by_output), self.parameters)


class NotAlone(Exception):
    """Raised if a sample alone has other outputs than in the batch, so the loop over samples is no reference."""


def _stacked(samples: list[Grads]) -> Grads:
    return {name: torch.stack([grads[name] for grads in samples]) for name in samples[0]}


def _random_state(model: nn.Module) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + [torch.cuda.get_rng_state(device) for device in cuda_devices(model)]


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
    return difference(a, b) > (4 * torch.finfo(b.dtype).eps if tolerance is None else tolerance) * largest(b)


class _Dtypes(TorchDispatchMode):
    """A dispatch mode that records the dtypes of all computed floating values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {value.dtype for value in tensors_in(result) if value.is_floating_point()}
        return result
