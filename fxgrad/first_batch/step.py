"""One forward and one backward of a compiled graph, on copies of its inputs; their results are delivered to nothing.

The results are gradients by placeholders that lead to no parameter, so nothing is delivered, counted or added.

Note [What the two steps can see]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The user's loss is outside the model, so fxgrad gives each output a gradient. If row i of an output belongs to sample i,
the gradient is r (1 + softsign(y / rms)). It has to depend on y: under a constant gradient, the per-sample gradients of
the layer before ``y - y.mean(0)`` would not change, and under a user's loss they do. softsign never increases a
relative error of y. An output that sums over samples gets only r, since a loss inside the model is linear in it.

r varies between elements and depends only on each index. Changed lengths may make an output longer, and the elements of
sample i have to keep their r. Along a dimension with more than the sample index (rows of packed data), r is constant,
because the positions of a sample may change there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxgrad.capture.shared_memory import copies
from fxgrad.host.autograd import saved_tensors_hooks_aside
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities import Quantity
from fxgrad.runtime.deliveries import placeholder

if TYPE_CHECKING:
    from fxgrad.compile.transformed import Transformed


@dataclass
class Step:
    """The forward and the backward of one compiled graph, apart from the user's step."""

    graph: Transformed
    args: Sequence[Any]
    quantities: Sequence[Quantity]
    parameters: Mapping[str, Tensor]
    weights: Sequence[Tensor]  # the inputs that quantities add, such as sample weights

    def __post_init__(self) -> None:
        self.scales: dict[int, Tensor] = {}  # the rms of each output in the first step
        self.size = self.graph.size_of(self.args)

    def inputs(self) -> list[Any]:
        """Copy the graph's inputs, except parameters that it only reads; for a batch of one it does not say which."""
        writes = self.graph.interface.writes
        written = () if writes is None else writes.by_input
        copied = {
            i: arg
            for i, arg in enumerate(self.args)
            if isinstance(arg, Tensor) and (self.size == 1 or i in written or not isinstance(arg, nn.Parameter))
        }
        new = {i: self.args[i].detach() for i in self.graph.interface.trainable.values()} | copies(copied, written)
        return [new.get(i, arg) for i, arg in enumerate(self.args)]

    def results(self, inputs: Sequence[Any]) -> list[Tensor | None]:
        """Run the step and return what the quantities deliver, in order; None where no output leads to it."""
        asked = [one for q in self.quantities for one in q.deliveries(q.units(self.size), self.parameters)]
        placeholders = [placeholder(delivery).requires_grad_() for delivery in asked]
        with _undisturbed(self.args):
            found = self.graph.compiled(*inputs, *placeholders, *self.weights)
            if self.graph.whole:
                return list(found[len(found) - len(placeholders) :])
            outputs = enumerate(found)
            real = [(i, y) for i, y in outputs if isinstance(y, Tensor) and y.requires_grad]
            taken = {i: y for i, y in real if i not in self.graph.interface.uniform}
            if not taken:
                return [None] * len(asked)
            with torch.autocast(device_of(self.parameters).type, enabled=False):  # as in the user's backward
                grads = [self._gradient(i, y.detach()) for i, y in taken.items()]
                return list(torch.autograd.grad(list(taken.values()), placeholders, grads, allow_unused=True))

    def _gradient(self, i: int, y: Tensor) -> Tensor:
        """Return the gradient of an output. See Note [What the two steps can see]."""
        real = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
        wide_y = real.to(accumulating(real.dtype))
        if not y.dim():
            return torch.ones_like(y)
        layout = self.graph.interface.batched.get(i)
        r = _varied(wide_y, layout.dim if layout is not None and layout.merged else None)
        if layout is not None:
            if i not in self.scales:
                finite = torch.where(wide_y.isfinite(), wide_y, 0)
                self.scales[i] = finite.square().mean().sqrt().clamp_min(torch.finfo(wide_y.dtype).tiny)
            r = r * (1 + torch.nn.functional.softsign(wide_y / self.scales[i]))
        r = r.to(real.dtype)
        return torch.view_as_complex(r) if y.is_complex() else r


def _varied(y: Tensor, constant: int | None) -> Tensor:
    """Return a number per element, a function of its indices. See Note [What the two steps can see]."""
    r = y.new_ones(())
    for d, size in enumerate(y.shape):
        if d != constant:
            by_index = torch.arange(size, dtype=y.dtype, device=y.device).mul(1.7).add(d).cos() + (1.5 if d == 0 else 0)
            r = r * by_index.view(-1, *[1] * (y.dim() - 1 - d))
    return r.expand(y.shape)


def device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    return next(iter(parameters.values())).device


@contextlib.contextmanager
def _undisturbed(args: Sequence[Any]) -> Iterator[None]:
    """Preserve the random state and remove saved-tensor hooks: a checkpoint around the model counts tensors."""
    devices = {arg.device.index for arg in args if isinstance(arg, Tensor) and arg.is_cuda}
    with saved_tensors_hooks_aside(), torch.random.fork_rng(sorted(devices)):
        yield
