"""FSDP2 in two processes against the loop over single samples; each case is in tests/sharded_processes.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests.sharded_more  # noqa: F401 - registers cases
from tests.sharded_processes import CASES, WORLD

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes found: one pair of them for all cases."""
    return findings("tests.sharded_processes", tmp_path_factory.mktemp("processes"))


def findings(program: str, folder: Path) -> list[dict[str, str]]:
    """Run a program in two processes that meet in a folder; return what each found of its cases."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", program, str(rank), str(folder)],
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
