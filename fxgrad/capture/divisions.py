"""Which way the processes have divided a model."""

from __future__ import annotations

from torch import nn

from fxgrad.capture.division import Division
from fxgrad.capture.gathering_properties import is_gathering
from fxgrad.capture.parallel import Layers, has_layers, is_parallel
from fxgrad.capture.sharded import units_of
from fxgrad.capture.sharded_layers import ShardedLayers
from fxgrad.capture.simple_fsdp import Properties


def division_of(model: nn.Module) -> Division | None:
    """Return how the processes have divided a model; None where they have not."""
    units = units_of(model)
    if units is not None:
        return ShardedLayers(model) if has_layers(model) else units
    if is_gathering(model):
        return Properties(model)
    return Layers(model) if is_parallel(model) else None
