"""The check that results are right: a float64 loop over single samples."""

import copy
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.peers.engine import EPSILON, NORMS, Results
from benchmarks.tasks import Quantity, Task, Training

TOLERANCES: dict[Quantity, float] = {
    "G": 1e-4,
    "N": 5e-4,  # torch's own float32 norm of 13 million entries is off by 1.2e-4 (c12)
    "C": 5e-4,
}
WEIGHT_TOLERANCE = 1e-3


class Reference:
    """The truth about one task; what is small of it is computed once.

    Error, per parameter: max |a - b| / max(max |b|, 1e-3 of the largest |b| over all parameters).
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        model = copy.deepcopy(task.model).double()
        self.training = Training(model, task.losses)
        self.params = dict(model.named_parameters())

    def error(self, quantity: Quantity, results: Results, weights: Tensor | None = None) -> float:
        """The largest difference; raises where results are missing, misshapen or not finite.

        fxgrad clips by upper bounds of the norms and tells its weights: these may be too small by WEIGHT_TOLERANCE,
        and C is compared with the sum that they make.
        """
        if quantity == "N":
            _check(results, {NORMS: self.norms.shape})
            return float((results[NORMS].to(self.norms) - self.norms).abs().max() / self.norms.max())
        if quantity == "C":
            _check(results, {name: p.shape for name, p in self.params.items()})
            truth = self.clipped if weights is None else self._weighted(weights)
            difference = {name: _largest(results[name].to(b) - b) for name, b in truth.items()}
            return _relative(difference, {name: _largest(b) for name, b in truth.items()})
        return self._grads_error(results)

    def _grads_error(self, results: Results) -> float:
        batch = len(self.task.x)
        _check(results, {name: torch.Size((batch, *p.shape)) for name, p in self.params.items()})
        difference, size = dict.fromkeys(self.params, 0.0), dict.fromkeys(self.params, 0.0)
        for i, grads in enumerate(self._grads()):
            for name, b in grads.items():
                difference[name] = max(difference[name], _largest(results[name][i].to(b) - b))
                size[name] = max(size[name], _largest(b))
        return _relative(difference, size)

    def _weighted(self, weights: Tensor) -> Results:
        """Σ_i w_i g_i, where the weights are no larger than those of clipping, and hardly smaller."""
        relative = weights.double() / (self.task.max_grad_norm / (self.norms + EPSILON)).clamp(max=1)
        if not (relative.min() >= 1 - WEIGHT_TOLERANCE and relative.max() <= 1 + TOLERANCES["C"]):
            raise AssertionError(f"clips by {float(relative.min()):.5f} to {float(relative.max()):.5f} of the weights")
        sums = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for weight, grads in zip(weights.double(), self._grads(), strict=True):
            for name, g in grads.items():
                sums[name] += weight * g
        return {name: total.detach() for name, total in sums.items()}

    @cached_property
    def norms(self) -> Tensor:
        """[B]: each sample's norm over all parameters."""
        return self._norms_and_clipped[0]

    @cached_property
    def clipped(self) -> Results:
        """Σ_i min(1, C / (n_i + 1e-6)) g_i"""
        return self._norms_and_clipped[1]

    @cached_property
    def _norms_and_clipped(self) -> tuple[Tensor, Results]:
        norms, sums = [], {name: torch.zeros_like(p) for name, p in self.params.items()}
        for grads in self._grads():
            norm = torch.stack([g.norm() for g in grads.values()]).norm()
            factor = (self.task.max_grad_norm / (norm + EPSILON)).clamp(max=1)
            for name, g in grads.items():
                sums[name] += factor * g
            norms.append(norm)
        return torch.stack(norms), {name: total.detach() for name, total in sums.items()}

    def _grads(self) -> Iterator[Results]:
        x, y = (v.double() if v.is_floating_point() else v for v in (self.task.x, self.task.y))
        for i in range(len(x)):
            loss = self.training(x[i : i + 1], y[i : i + 1])
            yield dict(zip(self.params, torch.autograd.grad(loss, list(self.params.values())), strict=True))


def _check(results: Results, shapes: dict[str, torch.Size]) -> None:
    if results.keys() != shapes.keys():
        raise AssertionError(f"no result for {sorted(shapes.keys() ^ results.keys())}")
    for name, shape in shapes.items():
        if not isinstance(results[name], Tensor) or results[name].shape != shape:
            raise AssertionError(f"{name}: shape {tuple(getattr(results[name], 'shape', ()))}, not {tuple(shape)}")
    if bad := [name for name, value in results.items() if not value.isfinite().all()]:
        raise AssertionError(f"results of {bad} are not finite")


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _relative(difference: dict[str, float], size: dict[str, float]) -> float:
    floor = 1e-3 * max(size.values())
    return max(difference[name] / max(size[name], floor) for name in size)
