"""Results on parameters that FSDP2's processes add up: of the samples of all, placed as the parameter's shard is.

    squares     Σ_r s_r                                     over the processes r, s_r = Σ_i g_i² of its own samples
    variance    Σ_r (B_r - 1) v_r + B_r (ḡ_r - ḡ)²          over B - 1, B = Σ_r B_r; v_r the variance of its own samples

The second is Chan, Golub and LeVeque's 1983 rule: no difference of two large sums. Every process takes part in every
collective, an empty batch with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities import Delivery, GradVariance, Quantity, SquaredGrad
from fxgrad.quantities.base import like_parameters

LOCAL = "norm_sample"
"""The one attribute of parameters that is of the process's own samples, and right where a parameter is divided."""

SQUARES, VARIANCE, SUM = "squared_grad_sum", "grad_variance", "_fxgrad_grad_sum"


@dataclass(frozen=True, repr=False)
class _VarianceAndSum(GradVariance):
    """A process's own variance, and the sum of its gradients."""

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        return super().deliveries(n, parameters) + like_parameters(SUM, parameters)

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        ones = {g.accumulating: g.like.new_ones(n, dtype=g.accumulating) for g in grads}
        return super().compute(grads, n, given) + [g.weighted(ones[g.accumulating]) for g in grads]

    def unreached(self, delivery: Delivery, n: int) -> Tensor:
        return Quantity.unreached(self, delivery, n)  # the samples of all processes decide whether it is NaN

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, GradVariance.__name__)


def per_process(quantities: Sequence[Quantity]) -> tuple[Quantity, ...]:
    """Return what each process computes of its own samples for these quantities."""
    return tuple(_VarianceAndSum(group_size=q.group_size) if type(q) is GradVariance else q for q in quantities)


def move_local(source: Tensor, target: Tensor) -> None:
    """Let the process's own result on one tensor be on another."""
    result = getattr(source, LOCAL, None)
    if result is not None or getattr(target, LOCAL, None) is not None:
        setattr(target, LOCAL, result)


def places_of(quantity: Quantity) -> tuple[str, ...]:
    """Return the attributes that the processes add up; a quantity of the user's own has none."""
    return {SquaredGrad: (SQUARES,), _VarianceAndSum: (VARIANCE, SUM)}.get(type(quantity), ())


class Results:
    """What the backwards of one model set on its shards, by the `accumulate` policy."""

    def __init__(self, quantities: Sequence[Quantity], policy: str) -> None:
        self.quantities, self.policy = quantities, policy
        self.places = {place for quantity in quantities for place in places_of(quantity)} - {SUM}

    def hold(self, shard: Any, whole: Any) -> None:
        """Let checks of results that are still set see those of a shard on its whole."""
        for place in self.places:
            setattr(whole, place, getattr(shard, place, None) if self.policy in ("error", "overwrite") else None)

    @torch.no_grad()
    def reduce(self, pairs: Sequence[tuple[Any, Any]], parameters: Iterable[Tensor], rows: int) -> None:
        """Add up over the processes what a backward over this one's rows set on whole parameters."""
        sums, reached = _Sums(rows), set(map(id, parameters))
        for shard, whole in pairs:
            if self.places and id(whole) in reached:
                for place, result in sums.results(self.quantities, shard, whole):
                    setattr(shard, place, self._joined(getattr(shard, place, None), result))
                setattr(whole, SUM, None)
                self.hold(shard, whole)

    def _joined(self, earlier: Any, result: Any) -> Any:
        if earlier is None or self.policy not in ("append", "sum"):
            return result
        if self.policy == "sum":
            return earlier + result
        return [*(earlier if isinstance(earlier, list) else [earlier]), result]


class _Sums:
    """The reductions of one backward over the processes of each shard's mesh."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.sizes: dict[tuple[Any, int], Tensor] = {}  # of all processes, by mesh and group size

    def results(self, quantities: Sequence[Quantity], shard: Any, whole: Any) -> Iterator[tuple[str, Any]]:
        """Yield the results of all processes for one parameter, by attribute."""
        for quantity in quantities:
            places = places_of(quantity)
            own = {place: getattr(whole, place).to(accumulating(shard.dtype)) for place in places}
            if SQUARES in own:
                yield SQUARES, _placed(own[SQUARES], shard)
            elif VARIANCE in own:
                yield VARIANCE, self._variance(own[VARIANCE], own[SUM], quantity, shard)

    def _variance(self, variance: Tensor, total: Tensor, quantity: Quantity, shard: Any) -> Any:
        size, sizes = quantity.units(self.rows), self._size(quantity, shard)
        mean = _sum(total, shard) / sizes.clamp(min=1)
        deviations = (size - 1) * variance if size > 1 else torch.zeros_like(variance)  # that of one sample is NaN
        if size:
            deviations = deviations + size * (total / size - mean).square()
        return _placed(deviations / (sizes - 1), shard)

    def _size(self, quantity: Quantity, shard: Any) -> Tensor:
        """Return the number of samples of all processes: one collective for a mesh and a group size."""
        key = shard.device_mesh, quantity.group_size
        if key not in self.sizes:
            self.sizes[key] = _sum(torch.tensor(quantity.units(self.rows), device=shard.device), shard)
        return self.sizes[key]


def _sum(own: Tensor, shard: Any) -> Tensor:
    """Return the sum over the processes, whole."""
    total = own.clone()
    for dim in range(shard.device_mesh.ndim):
        torch.distributed.all_reduce(total, group=shard.device_mesh.get_group(dim))
    return total


def _placed(own: Tensor, shard: Any) -> Any:
    """Return the sum over the processes as a DTensor with the parameter's placements and dtype."""
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(own, shard.device_mesh, [Partial()] * shard.device_mesh.ndim, run_check=False)
    return partial.redistribute(placements=shard.placements).to(shard.dtype)
