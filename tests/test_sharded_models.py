"""Models of several kinds under FSDP2, ten steps beside the loop over single samples; see tests/sharded_models.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.sharded_models import LAYOUTS, MODELS

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(1500)

ALL = tuple(MODELS)
LONG = [
    *((world, layout, "aot_eager", "float64", ALL) for world in (2, 4) for layout in LAYOUTS),
    (2, "root", "inductor", "float32", ("mlp", "moe")),
    (2, "blocks", "inductor", "float32", ("cnn", "gpt", "lstm")),
    (2, "hybrid", "inductor", "float32", ("llama",)),
    (2, "blocks", "aot_eager", "bfloat16", ("mlp", "cnn", "gpt", "llama")),
]
TABLE = [
    (2, "blocks", "aot_eager", "float64", ("mlp", "moe")),
    *(pytest.param(*row, marks=pytest.mark.long) for row in LONG),
]


@pytest.mark.parametrize(("world", "layout", "backend", "dtype", "names"), TABLE)
def test_sharded_models(
    tmp_path: Path, world: int, layout: str, backend: str, dtype: str, names: tuple[str, ...]
) -> None:
    cases = [f"{name} {layout} {backend} {dtype}" for name in names]
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
