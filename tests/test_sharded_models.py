"""Models of several kinds under FSDP2, ten steps beside the loop over single samples; see tests/sharded_models.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.sharded_models import MODELS

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(1500)

TABLE = [
    (2, "blocks", "aot_eager", ("mlp", "moe")),
    *(
        pytest.param(world, layout, backend, tuple(MODELS), marks=pytest.mark.long)
        for world, layout in ((2, "root"), (2, "blocks"), (4, "hybrid"))
        for backend in ("aot_eager", "inductor")
    ),
]


@pytest.mark.parametrize(("world", "layout", "backend", "names"), TABLE)
def test_sharded_models(tmp_path: Path, world: int, layout: str, backend: str, names: tuple[str, ...]) -> None:
    cases = [f"{name} {layout} {backend}" for name in names]
    commands = [
        [sys.executable, "-m", "tests.sharded_models", str(rank), str(tmp_path), str(world), *cases]
        for rank in range(world)
    ]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=1400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    for rank in range(world):
        assert torch.load(tmp_path / f"{rank}.pt") == dict.fromkeys(cases, "")
