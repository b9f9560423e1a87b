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
from fxgrad.kernels.precision import computable
from fxgrad.samples.batch import SHARED, Batch, map_tensors, tensors_in
from fxgrad.samples.layouts import Layout, samples_first
from fxgrad.untouched import cuda_devices
from fxgrad.verification.oracle import Grads, LossFn, default_loss, dense, gradients, state_restored
from fxgrad.verification.undivided import ByOutput, Undivided, added, undivided_outputs

SEED = 0  # of every forward, so that all draw the same random numbers
MOST = 1e3  # the largest factor between the weights of outputs: more would magnify rounding errors

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
    by_output: ByOutput
    grads: dict[str, Tensor | None]  # by each parameter; None if the loss does not depend on it
    draws: bool  # whether the model drew random numbers
    dtypes: set[torch.dtype]  # of all floating values that it computed
    places: list[Layout | None] = field(default_factory=list)  # the samples in each output, as `probe` saw them
    undivided: list[Undivided] = field(default_factory=list)  # the outputs without

    @property
    def by_divided(self) -> ByOutput:
        """Return the loss's gradient by each output with samples, also through undivided outputs."""
        rows: ByOutput = [None if place is None else g for g, place in zip(self.by_output, self.places, strict=True)]
        for one in self.undivided:
            rows = rows if one.through is None else added(rows, one.through)
        return rows


class Witness:
    """Runs of a model owned by the witness, each from the same state and random seed."""

    def __init__(self, model: nn.Module, inputs: Inputs, loss_fn: LossFn | None, scale: float) -> None:
        self.model, self.inputs, self.loss_fn = model, inputs, loss_fn
        self.scale = scale  # of the gradients, in place of the loss
        self.n = inputs.batch.size
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weight = 1.0  # of outputs without dims in the default loss

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
            return default_loss([computable(y) * self.weight if _is_loss(y) else y for y in tensors_in(output)])
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
            by_output = self._balanced(output, leaves)
            grads = gradients(leaves, self.parameters, by_output)
        torch.manual_seed(SEED)
        before = _random_state(self.model)
        draws = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return Whole([leaf.detach().clone() for leaf in leaves], by_output, grads, draws, dtypes.seen)

    def _balanced(self, output: Any, leaves: Sequence[Tensor]) -> ByOutput:
        """Choose the weight by which losses among the outputs count about as much as the others; return dL/dy.

        A mean loss has a far smaller gradient than the default loss of its logits, whose tolerance would hide it.
        """
        by_output = self.by_output(output)
        if self.loss_fn is None:
            losses = [g if not y.dim() else None for g, y in zip(by_output, leaves, strict=True)]
            others = [g if y.dim() else None for g, y in zip(by_output, leaves, strict=True)]
            by_losses, by_others = (self._largest(leaves, part) for part in (losses, others))
            if by_losses and by_others:
                self.weight *= min(max(by_others / by_losses, 1 / MOST), MOST)
                by_output = self.by_output(output)
        return by_output

    def _largest(self, leaves: Sequence[Tensor], by_output: ByOutput) -> float:
        """Return the largest element of the parameters' gradients."""
        grads = dense(gradients(leaves, self.parameters, by_output), self.parameters)
        return max(map(largest, grads.values()), default=0.0)

    def by_output(self, output: Any) -> ByOutput:
        """Return dL/dy for every tensor y of an output, as independent variables."""
        cut: list[Tensor] = []

        def leaf(y: Tensor) -> Tensor:
            cut.append(y.detach().clone().requires_grad_(y.requires_grad))
            return cut[-1]

        loss = self.loss(map_tensors(output, leaf))
        grads = gradients([loss], {k: y for k, y in enumerate(cut) if y.requires_grad})
        return [grads.get(k) for k in range(len(cut))]

    def undivided(self, whole: Whole, tolerance: float) -> list[Undivided]:
        """Return the outputs without a sample layout that the loss depends on."""
        if all(g is None or place is not None for g, place in zip(whole.by_output, whole.places, strict=True)):
            return []
        with self.forward(self.model, self.inputs.fresh()) as output:
            return undivided_outputs(tensors_in(output), whole.by_output, whole.places, self.parameters, tolerance)

    def alone(self, whole: Whole, tolerance: float) -> tuple[Grads, list[Grads]]:
        """Return the gradients of all samples through outputs with samples, and through each undivided output.

        They are from a forward and backwards of each sample alone, and not scaled. Raise `NotAlone` if that forward
        does not give the sample's rows of the batch's outputs, up to a tolerance.
        """
        by_divided, grads = whole.by_divided, []
        for i in range(self.n):
            with self.forward(self.model, self.inputs.sample(i)) as output:
                leaves = tensors_in(output)
                for y, all_y, place in zip(leaves, whole.outputs, whole.places, strict=True):
                    rows = y if place is None else row(all_y, place, self.n, i)
                    if y.shape != rows.shape or differs(y, rows, tolerance).any():
                        raise NotAlone(f"sample {i} alone has other outputs than in the batch")
                several = [self._backward(leaves, by_divided, whole.places, partial(row, n=self.n, i=i))]
                for one in whole.undivided:
                    alone: ByOutput = [g if k == one.index else None for k, g in enumerate(whole.by_output)]
                    several.append(dense(gradients(leaves, self.parameters, alone), self.parameters))
                grads.append(several)
        divided, *undivided = (_stacked(samples) for samples in zip(*grads, strict=True))
        return divided, undivided

    def within(self, whole: Whole) -> Grads:
        """Return the gradients of all samples through outputs with samples, by one forward of the batch.

        Each is from a backward from the sample's own part of the outputs, and not scaled.
        """
        if self.n == 1:  # all outputs are the sample's own
            return _stacked([dense(whole.grads, self.parameters)])
        with self.forward(self.model, self.inputs.fresh()) as output:
            leaves, by_divided = tensors_in(output), whole.by_divided
            parts = [partial(_masked, n=self.n, i=i) for i in range(self.n)]
            return _stacked([self._backward(leaves, by_divided, whole.places, part) for part in parts])

    def _backward(
        self,
        leaves: Sequence[Tensor],
        by_output: ByOutput,
        places: Sequence[Layout | None],
        part: Callable[[Tensor, Layout], Tensor],
    ) -> Grads:
        """Return the gradients by one sample's part of the loss's gradient."""
        pairs = zip(by_output, places, strict=True)
        own: ByOutput = [None if g is None or place is None else part(g, place) for g, place in pairs]
        return dense(gradients(leaves, self.parameters, own), self.parameters)


class NotAlone(Exception):
    """Raised if a sample alone has other outputs than in the batch, so the loop over samples is no reference."""


def _is_loss(y: Tensor) -> bool:
    return not y.dim() and (y.is_floating_point() or y.is_complex())


def _stacked(samples: Sequence[Grads]) -> Grads:
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
