"""Noise for a model that FSDP2 divided: each process draws that of its own shards.

    shards of different places     different streams: seeds differ in their low bits, which are the place
    replicas of a shard (HSDP)     one stream: the seed of the first of them
    parameters                     in the model's order, which every process shares

So every element of every parameter gets one draw, and replicas stay equal.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import opacus
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxgrad.api import engine_of
from fxgrad.capture.parallel import has_layers, refuse_private
from fxgrad.capture.sharded import units_of
from fxgrad.engine import Engine
from fxgrad.errors import OptionError
from fxgrad.host.fsdp import local_part
from fxgrad.opacus.processes import BITS, processes, seed_at

ONE_MESH = "Call fully_shard on the model itself, too, with one mesh of all processes for all units."


def unit_of(
    model: Any,
    engine: opacus.PrivacyEngine,
    *,
    wrapped: bool,
    one_backward: bool,
    clipping: Any,
    poisson_sampling: bool,
    independent: bool,
    fix: bool,
    check_first_batch: bool,
) -> nn.Module | None:
    """Return the object of a divided model that FSDP2 knows; None for a model that is not divided.

    Args:
        model: the model, or the transformed one.
        engine: Opacus's.
        wrapped: whether the model is in DistributedDataParallel.
        one_backward, clipping, poisson_sampling, independent, fix, check_first_batch: those of `make_private`.

    Raises:
        OptionError: an argument that is not supported for a divided model; a parameter in no unit; a mesh that is not
            of all processes; settings of FSDP2 for which p.grad is not the average over them.
    """
    units = units_of(model) if isinstance(model, nn.Module) else None
    if units is None:
        return None
    if has_layers(model):
        refuse_private()
    transformed = engine_of(model)
    checks = check_first_batch if transformed is None else transformed.first_batch is not None
    unsupported = {
        "DistributedDataParallel": (wrapped, "Pass the model itself."),
        "one_backward=False": (not one_backward, "Pass one_backward=True; to PrivacyEngine, grad_sample_mode='ghost'."),
        f"clipping={clipping!r}": (clipping != "flat", "Pass clipping='flat', or use DistributedDataParallel."),
        "poisson_sampling=False": (not poisson_sampling, "Leave it out."),
        "independent=True": (independent, "Leave it out: FSDP2 trains one model in all processes."),
        "fix=True": (fix, "Call fxgrad.opacus.fix(model) before fully_shard."),
        "secure_mode=True": (engine.secure_mode, "Leave it out, or use DistributedDataParallel."),
        "check_first_batch=True": (
            checks,
            "Pass check_first_batch=False, and call fxgrad.verify(model, x) in one process before fully_shard.",
        ),
    }
    for what, (is_asked, advice) in unsupported.items():
        if is_asked:
            raise OptionError(f"{what} is not supported for a model that FSDP2 has sharded", advice=advice)
    mesh_of([*model.parameters()])
    units.check_averages()
    return _root(model, transformed)


def _root(model: Any, transformed: Engine | None) -> nn.Module:
    """Return the object of a model that FSDP2 knows: the model itself or the transformed one."""
    known = (model, None if transformed is None else transformed.model)
    unit: Any = next((one for one in known if isinstance(one, FSDPModule)), None)
    if unit is None:
        raise OptionError("the model is no unit of FSDP2, only modules in it are", advice=ONE_MESH)
    return unit  # type: ignore[no-any-return]


def noise_of_shards(transformed: Engine, generator: torch.Generator | None) -> ShardNoise:
    """Return the noise for a divided model, which may have been divided since it was transformed."""
    if transformed.units is None:
        transformed.find_units()
    return ShardNoise([*transformed.model.parameters()], generator)


class ShardNoise:
    """Normal noise for the shards of one process.

    The seed comes from the system's randomness, or from one draw of the user's generator. It is neither kept nor shown.

    Args:
        parameters: all parameters of a model that ``fully_shard`` divided over one mesh of all processes.
        generator: the user's; None for a secret seed.

    Every process has to make it at the same time: replicas of a shard agree on a seed, by a broadcast among themselves.
    """

    def __init__(self, parameters: Sequence[Tensor], generator: torch.Generator | None) -> None:
        self.mesh, self.placements = mesh_of(parameters)
        self._generator = torch.Generator(local_part(parameters[0]).device)
        self._generator.manual_seed(self._seed(generator))

    def _seed(self, generator: torch.Generator | None) -> int:
        """Return a seed of this process's shards."""
        shared = torch.tensor(seed_at(_drawn(generator), *self._place()), device=self.mesh.device_type)
        for dim in [dim for dim, placement in enumerate(self.placements) if isinstance(placement, Replicate)]:
            group = self.mesh.get_group(dim)
            dist.broadcast(shared, dist.get_global_rank(group, 0), group)
        return int(shared)

    def _place(self) -> tuple[int, int]:
        """Return the place of this process's shards among all, and the number of places."""
        coordinate = self.mesh.get_coordinate()
        place, places = 0, 1
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                place = place * self.mesh.size(dim) + coordinate[dim]
                places *= self.mesh.size(dim)
        return place, places

    def added(self, sums: Iterable[Tensor], deviation: float) -> list[Tensor]:
        """Return sums with noise of a standard deviation in each element; the sums stay as they are.

        Args:
            sums: DTensors with the placements of the parameters, in an order that all processes share.
            deviation: the standard deviation, in the units of the sums.
        """
        noised = []
        for total in sums:
            self._check_placement(total)
            noised.append(total.clone())
            here = local_part(noised[-1])
            if deviation:
                here += torch.normal(
                    0.0, deviation, here.shape, generator=self._generator, dtype=here.dtype, device=here.device
                )
        return noised

    def _check_placement(self, total: Tensor) -> None:
        if not isinstance(total, DTensor) or not _alike((total.device_mesh, total.placements), self):
            raise OptionError(
                "a gradient is divided in another way than the parameters were when make_private was called",
                advice="Call make_private after the last change of the model, with a new optimizer.",
            )


def mesh_of(parameters: Sequence[Tensor]) -> tuple[Any, tuple[Any, ...]]:
    """Return the one mesh of a model's parameters, and how they lie on it.

    Raises:
        OptionError: a parameter is in no unit; or they lie on several meshes, or on fewer than all processes.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            raise OptionError(
                f"a parameter of shape {list(parameter.shape)} is in no unit of FSDP2, which would neither sum its "
                "gradients over the processes nor keep it equal on them",
                advice=ONE_MESH,
            )
    first: Any = parameters[0]
    mesh, placements = first.device_mesh, first.placements
    for parameter in parameters:
        if not _alike((parameter.device_mesh, parameter.placements), (mesh, placements)):  # type: ignore[attr-defined]
            raise OptionError("the units of FSDP2 lie on different meshes", advice=ONE_MESH)
    kinds = [type(placement) for placement in placements]
    if kinds not in ([Shard], [Replicate, Shard]) or mesh.size() != processes():
        raise OptionError(
            f"the parameters lie as {placements} on {mesh.size()} of {processes()} processes, and a private step "
            "knows fully_shard over all of them alone, with or without replicas",
            advice=ONE_MESH,
        )
    return mesh, placements


def _alike(one: Any, other: Any) -> bool:
    """Return whether two pairs of mesh and placements are the same, whatever dimension is divided."""
    if isinstance(other, ShardNoise):
        other = other.mesh, other.placements
    return one[0] == other[0] and [type(p) for p in one[1]] == [type(p) for p in other[1]]


def _drawn(generator: torch.Generator | None) -> int:
    """Draw a seed from the system's randomness, or from a user's generator."""
    if generator is None:
        return secrets.randbits(BITS)
    return int(torch.randint(2**BITS, (), generator=generator, device=generator.device))
