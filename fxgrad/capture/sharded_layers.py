"""FSDP2 and tensor parallelism together: units around parallel layers, on a mesh with a dimension for each.

    gather    units gather over their dimension: whole parameters are then DTensors of the parallel layers
    local     parallel layers put local parts in their places; the call runs as under tensor parallelism alone
    reduce    p.grad of local parts becomes that of the DTensors, which units average and shard

Collectives of the graph are over the dimension of tensor parallelism, whose processes have one batch. Those of units
are over the others, before the call and behind the backward. So all units are whole from a call to the end of its
backward, and batches of different sizes, empty ones too, meet in the same collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.division import Division
from fxgrad.capture.options import Options
from fxgrad.capture.parallel import Layers, refuse_private
from fxgrad.capture.sharded import Units
from fxgrad.capture.sharded_results import Results
from fxgrad.errors import OptionError
from fxgrad.host import fsdp
from fxgrad.quantities.regional import Region, regional
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.guard import Guard

_ONE_GRID = (
    "Call parallelize_module over one dimension of a mesh, then fully_shard over its others, with one mesh for all "
    "units: parallelize_module(model, mesh['tp'], ..), fully_shard(block, mesh=mesh['dp']), fully_shard(model, ..)."
)


class ShardedLayers(Units):
    """The units of one model whose modules are parallel layers."""

    one_program = True
    settled = False  # the layers are known once the units are whole

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.layers: Layers | None = None

    def settle(self, options: Options, policy: str) -> Options:
        self.results = Results(options.quantities, policy)
        if self.layers is None:
            return replace(options, quantities=regional(options.quantities, Region("", ())))
        self.settled = True
        return self.layers.settle(options, policy)

    @contextlib.contextmanager
    def whole(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Gather all parameters, and let their local parts be those of an ordinary model; yields the arguments."""
        with super().whole(args, kwargs) as (args, kwargs):
            meshes = fsdp.meshes_of(self.states)
            layers = self.layers or Layers(self.model, next(iter(meshes.values()), None))
            self._check_grid(layers, meshes)
            self.layers = layers
            with layers.whole(args, kwargs) as (args, kwargs):
                self.machine = layers.machine
                yield args, kwargs

    def _check_grid(self, layers: Layers, meshes: Mapping[int, Any]) -> None:
        """Refuse parameters that units do not reduce over the processes which have other batches."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in meshes:
                raise OptionError(
                    f"parameter '{name}' of a tensor-parallel model is in no unit of FSDP2, whose processes add "
                    "nothing up for it",
                    advice="Call fully_shard on the model itself, too, without ignored_params; or freeze it.",
                )
        processes = {frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes.values()}
        one = {torch.distributed.get_rank()}
        if len(processes) > 1 or any(others & layers.processes() != one for others in processes):
            raise OptionError(
                "units of FSDP2 and parallel layers do not lie on different dimensions of one mesh",
                advice=_ONE_GRID,
            )

    def check_graph(self, gm: fx.GraphModule) -> None:
        self._layers().check_graph(gm)

    def _layers(self) -> Layers:
        assert self.layers is not None, "the model has not been called"
        return self.layers

    def parameters(self) -> list[nn.Parameter]:
        return super().parameters() + ([] if self.layers is None else self.layers.parameters())

    def shards(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return super().shards(self._layers().shards(parameters))

    def guard(self, guard: Guard, parameters: Mapping[str, Tensor]) -> None:
        super().guard(guard, self._layers().shards(parameters))
        self._layers().guard(guard, parameters)

    def replaced(self) -> Collection[int]:
        return self._layers().replaced()

    def begin(self, forward: Forward, guarded: bool) -> None:
        Division.begin(self, forward, guarded)  # of DTensors, in whose places local parts stand
        super().begin(forward, guarded)

    def check_averages(self) -> None:
        refuse_private()

    def reduce(self, task: int, adds: bool, parameters: Mapping[str, Tensor], rows: int) -> None:
        self._layers().reduce(task, adds, parameters, rows)
        super().reduce(task, adds, parameters, rows)

    def _reduce(self, parameters: Mapping[str, Tensor], rows: int) -> None:
        super()._reduce(parameters, rows)
        self._layers().drop_grads()
