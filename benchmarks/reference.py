"""The check that results are right: a float64 loop over single samples."""

import copy
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.peers.engine import EPSILON, NORMS, Results
from benchmarks.tasks import Quantity, Task, Training

TOLERANCE = 1e-4


class Reference:
    """The truth about one task; what is small of it is computed once.

    Error, per parameter: max |a - b| / max(max |b|, 1e-3 of the largest |b| over all parameters).
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        model = copy.deepcopy(task.model).double()
        self.training = Training(model, task.losses)
        self.params = dict(model.named_parameters())

    def error(self, quantity: Quantity, results: Results) -> float:
        """The largest difference; raises where results are missing, misshapen or not finite."""
        if quantity == "N":
            _check(results, {NORMS: self.norms.shape})
            return float((results[NORMS].to(self.norms) - self.norms).abs().max() / self.norms.max())
        if quantity == "C":
            _check(results, {name: p.shape for name, p in self.params.items()})
            difference = {name: _largest(results[name].to(b) - b) for name, b in self.clipped.items()}
            return _relative(difference, {name: _largest(b) for name, b in self.clipped.items()})
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
