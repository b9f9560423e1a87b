"""FSDP2 in two processes against the loop over single samples; each case is in tests/sharded_processes.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests.sharded_misuse
import tests.sharded_more  # noqa: F401 - registers cases
from tests.sharded_processes import CASES, WORLD

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes found: one pair of them for all cases."""
    folder = tmp_path_factory.mktemp("processes")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharded_processes", str(rank), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [process.communicate(timeout=560)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_sharded(found: list[dict[str, str]], case: str) -> None:
    for rank in range(WORLD):
        assert found[rank].get(case, "not run, as an earlier case failed") == "", found[rank].get(case)
