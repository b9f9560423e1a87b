"""A case of tests/sharded_long.py: the collectives of a step, as the profiler sees them in each process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fxgrad
from tests.sharded_processes import WORLD, C, ids, loss, tied, units

SIZES = [(2, 3), (1, 3), (3, 1), (0, 3), (1, 0), (0, 0), (7, 7)]
QUANTITIES = ([fxgrad.ClippedGrad(C)], [fxgrad.ClippedGrad(C), fxgrad.SquaredGrad(), fxgrad.GradVariance()])
SHAPES = ((WORLD,), (1, WORLD), (WORLD, 1))


def collectives_of(model: Any, x: Tensor) -> list[str]:
    """Return the collectives of a step in their order: each with the sizes and dtypes of its tensors.

    The op tells the group: FSDP2 gathers and scatters over the shards, and all-reduces over the replicas.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        loss(model(x)).backward()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if "ts" in event]
    ours = [event for event in sorted(events, key=lambda event: event["ts"]) if event["name"].startswith("c10d::")]
    return [f"{event['name']} {event['args']['Input Dims']} {event['args']['Input type']}" for event in ours]


def one_sequence(rank: int, backend: str) -> None:
    """Every process makes the same collectives in one order, and batches of other sizes change nothing."""
    for shape in SHAPES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for quantities in QUANTITIES:
            private = fxgrad.transform(units(tied(), mesh=mesh), quantity=quantities, backend=backend)
            sequences = []
            for sizes in ((2, 3), *SIZES):
                private.zero_grad()
                sequences.append(collectives_of(private, ids(sizes)[rank]))
            sequences = sequences[1:]  # a first call has others, too
            every: list[Any] = [None] * WORLD
            dist.all_gather_object(every, sequences)
            assert len(sequences[0]) >= 4, sequences[0]  # a reduction of each unit, at least
            for process in every:
                for sizes, sequence in zip(SIZES, process, strict=True):
                    assert sequence == sequences[0], (shape, sizes, sequence, sequences[0])
