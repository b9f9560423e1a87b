"""What distributes a model: DistributedDataParallel goes around a transformed one, all else is refused by name.

Every process of DistributedDataParallel has a whole model and its own samples, so per-sample gradients need
nothing from the others, and what is added to p.grad is averaged over the processes as any gradient is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.errors import OptionError
from fxgrad.host.modules import FSDP_FLAT, FSDP_MANAGED, wrapped_by_ddp

AROUND = "Transform the model itself, and put the transformed one into DistributedDataParallel."


def check_distribution(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Refuse what splits a model or its parameters: the passes would not see whole ones."""
    sharded = _classes("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDPModule")
    for name, part in model.named_modules():
        where = f"in {type(part).__name__} '{name}'" if name else ""
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise OptionError(
                "DistributedDataParallel goes around a transformed model, not into it", where=where, advice=AROUND
            )
        if isinstance(part, nn.DataParallel):
            raise replicated(where)
        if isinstance(part, sharded) or part.__dict__.get(FSDP_MANAGED):
            raise OptionError(
                "FullyShardedDataParallel (FSDP) is not supported yet: a parameter has no place for per-sample "
                "gradients while it is in pieces",
                where=where,
                advice=AROUND,
            )
    check_whole(model, parameters, [])


def check_whole(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Iterable[Any]) -> None:
    """The same at each call, where something may have been put around the model since: it has to be quick."""
    split = _classes("torch.distributed.tensor", "DTensor")
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter and isinstance(parameter.data, split):
            raise OptionError(
                f"parameter '{name}' is a DTensor: sharded models and tensor parallelism are not supported yet",
                advice=AROUND,
            )
        if not parameter.is_leaf or name.endswith(FSDP_FLAT):  # FSDP puts views, or one flat parameter, in place
            check_distribution(model, {})
    if split and any(isinstance(value, split) for value in inputs):
        raise OptionError("an input is a DTensor: sharded inputs are not supported yet", advice=AROUND)


def group_around() -> Any:
    """Return the processes of the DistributedDataParallel whose forward is running; None outside of one."""
    around: Any = wrapped_by_ddp()  # Dynamo asks for it, too
    return None if around is None else around.process_group


def check_averages_last() -> None:
    """Refuse an averaging that changes p.grad before a guard has compared it with what was delivered."""
    around: Any = wrapped_by_ddp()
    if around is not None and around.static_graph:
        raise OptionError(
            "DistributedDataParallel with static_graph=True averages gradients before fxgrad can compare p.grad with "
            "what it has clipped",
            advice="Leave out static_graph=True. For parameters that a forward does not use, pass "
            "find_unused_parameters=True.",
        )


def largest_of_all(value: int, group: Any, device: torch.device) -> int:
    """The largest value in a group of processes, all of which have to call this; without a group the value itself."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return value
    shared = torch.tensor(value, device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group)
    return int(shared)


def replicated(where: str = "") -> OptionError:
    return OptionError(
        "nn.DataParallel is not supported: it runs copies of the model, whose parameters are not the model's",
        where=where,
        advice=AROUND,
    )


def _classes(module: str, *names: str) -> tuple[type, ...]:
    """Return no class for a part of PyTorch that is not imported: it has no instances."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))
