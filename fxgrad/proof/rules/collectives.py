"""Rules of the collectives of tensor parallelism: every process has the same samples at the same places."""

from __future__ import annotations

from torch import Tensor

from fxgrad.proof.calls import Call
from fxgrad.proof.origins import folded
from fxgrad.proof.rules.registry import follows


@follows("fxgrad::copy_to_region fxgrad::reduce_from_region fxgrad::rows_of_region")
def at_its_place(call: Call) -> Tensor:
    return call.ids("x")


@follows(
    """fxgrad::gather_from_region fxgrad::scatter_to_region fxgrad::gather_from_sequence
    fxgrad::reduce_scatter_to_sequence"""
)
def along_a_dimension(call: Call) -> Tensor:
    """Join ids along the dimension that is divided."""
    ids = call.ids("x")
    return folded(ids, call.dims("dim", ids.dim()))
