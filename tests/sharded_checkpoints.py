"""One of several processes with checkpoints: `python -m tests.sharded_checkpoints RANK FOLDER WORLD DO`.

With DO = save, private steps on a model that FSDP2 shards, a checkpoint of torch.distributed, whole tensors beside it,
and the parameters after further steps. With DO = load, the same from the checkpoint of each number of processes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxgrad
from tests.sharded_processes import C, ids, loss, tied, units

WORLDS = (1, 2, 4)
BEFORE, AFTER = range(3), range(3, 5)  # steps, by the seeds of their batches
SAMPLES = 7


def private(seed: int) -> tuple[Any, Any]:
    """Return a model and its optimizer; FSDP2 adds up, so that a step is the same for each number of processes."""
    model: Any = units(tied(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    for unit in (transformed, *model.blocks):
        unit.set_gradient_divide_factor(1.0)
    return transformed, torch.optim.AdamW(transformed.parameters(), lr=0.01)


def trains(model: Any, optimizer: Any, seeds: range) -> None:
    """Take steps with the samples of the seeds, as many of them on each process as there are."""
    world = dist.get_world_size()
    for seed in seeds:
        sizes = [len(part) for part in torch.arange(SAMPLES).tensor_split(world)]
        optimizer.zero_grad()
        loss(model(ids(sizes, seed)[dist.get_rank()])).backward()
        optimizer.step()


def whole(values: Any) -> Any:
    """Return nested states as whole tensors, which later steps do not change."""
    if isinstance(values, Mapping):
        return {name: whole(value) for name, value in values.items()}
    if isinstance(values, list):
        return [whole(value) for value in values]
    if isinstance(values, Tensor):
        values = values.full_tensor() if isinstance(values, DTensor) else values
        return values.clone()  # of one process it may be the parameter itself
    return values


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def saves(folder: Path, world: int) -> None:
    model, optimizer = private(seed=0)
    trains(model, optimizer, BEFORE)
    save(states(model, optimizer), checkpoint_id=folder / f"by {world}")
    before = whole(states(model, optimizer))
    trains(model, optimizer, AFTER)
    after = parameters(model)
    if dist.get_rank() == 0:
        torch.save((before, after), folder / f"by {world}.pt")


def loads(folder: Path, world: int) -> None:
    """Load the checkpoint of each number of processes, bit for bit, and go on."""
    for other in WORLDS:
        model, optimizer = private(seed=1)
        state = states(model, optimizer)
        load(state, checkpoint_id=folder / f"by {other}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        before, after = torch.load(folder / f"by {other}.pt")
        assert_equal(whole(states(model, optimizer)), before, f"{other} to {world}")
        trains(model, optimizer, AFTER)
        found = parameters(model)
        errors = {name: float((found[name] - p).abs().max()) for name, p in after.items()}
        assert max(errors.values()) <= 1e-12, (other, world, errors)
        print(f"{other} to {world}: equal bit for bit; {max(errors.values()):.1e} behind {len(AFTER)} more steps")


def assert_equal(found: Any, expected: Any, path: str) -> None:
    """Compare nested states bit for bit."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal(found[key], value, f"{path}: {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for i, value in enumerate(expected):
            assert_equal(found[i], value, f"{path}: {i}")
    elif isinstance(expected, Tensor):
        assert found.dtype is expected.dtype and torch.equal(found, expected), path
    else:
        assert found == expected, path


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, folder, world, do = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    meet = f"file://{folder / f'meet of {world} that {do}'}"
    dist.init_process_group("gloo", meet, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    {"save": saves, "load": loads}[do](folder, world)
    dist.destroy_process_group()
