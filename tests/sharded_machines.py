"""Processes that were measured as different machines: `python -m tests.sharded_machines RANK FOLDER BACKEND`.

What is compiled depends on the machine. So the two processes compute norms in different ways, and meet all the same.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import fxgrad
from fxgrad.costs import machines
from fxgrad.costs.machines import Machine
from tests.sharded_processes import WORLD, C, assert_grads, case, clipped_sum, loss, main, units

MACHINES = (
    Machine(mkl=1e3, onednn=1e3, batched=1e3, kernel=1e12, memory=1e12, cache=1e12, call=1e12),
    Machine(mkl=1e12, onednn=1e12, batched=1e12, kernel=1e6, memory=1e3, cache=1e3, call=1e12),
)
"""One holds the gradients of all samples, the other multiplies factors."""
LENGTH, WIDTH = 4, 16


def ways_of(model: nn.Module) -> list[Any]:
    """Return how the norms of a model's weights are computed on this machine."""
    x = torch.zeros(7, LENGTH, WIDTH, dtype=next(model.parameters()).dtype)
    found = fxgrad.explain(model, x, quantity=fxgrad.ClippedGrad(C))
    return [step.contracted.way for p in found.parameters for step in p.steps if step.contracted]


def differ(rank: int, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    """Two weights of one shape: a gather of one that is taken for the other's would be seen by the numbers alone."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    alone = copy.deepcopy(model).double()
    model.to(dtype)
    file = Path(tempfile.mkdtemp()) / "machines.json"
    file.write_text(json.dumps({machines.entry_of(torch.device("cpu")): asdict(MACHINES[rank])}))
    with patch.dict(os.environ, {machines.VARIABLE: str(file)}):
        every: list[Any] = [None] * WORLD
        dist.all_gather_object(every, ways_of(copy.deepcopy(model)))
        assert all(one != other for one, other in zip(every[0][::2], every[1][::2], strict=True)), every
        model = units(model, [model[0], model[2]])
        private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend=backend)
        for step, sizes in enumerate([(0, 7), (1, 7), (2, 1), (7, 0)]):
            torch.manual_seed(step)
            x = torch.randn(sum(sizes), LENGTH, WIDTH, dtype=torch.float64)
            private.zero_grad()
            loss(private(x.split(list(sizes))[rank].to(dtype))).backward()
            assert_grads(private, clipped_sum(alone, x), tolerance)


RUNS = {
    "aot_eager": partial(differ, backend="aot_eager", dtype=torch.float64, tolerance=1e-10),
    # Clipping divides by an upper bound of the norm: in float32, and on one of the machines, 2.5e-5 above it.
    "inductor": partial(differ, backend="inductor", dtype=torch.float32, tolerance=1e-4),
}


@case
def machines_that_differ(rank: int) -> None:
    RUNS["aot_eager"](rank)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), Path(sys.argv[2]), RUNS)
