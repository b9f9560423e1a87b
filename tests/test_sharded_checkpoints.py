"""Checkpoints of sharded models between 1, 2 and 4 processes, each way; see tests/sharded_checkpoints.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharded_checkpoints import WORLDS

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_checkpoints_move_between_numbers_of_processes(tmp_path: Path) -> None:
    every = set()
    for do in ("save", "load"):
        commands = [
            [sys.executable, "-m", "tests.sharded_checkpoints", str(rank), str(tmp_path), str(world), do]
            for world in WORLDS
            for rank in range(world)
        ]
        processes = [
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        try:
            said = [process.communicate(timeout=700)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert all(process.returncode == 0 for process in processes), "\n".join(said)
        every = {line.partition(":")[0] for text in said for line in text.splitlines() if " to " in line}
    assert every == {f"{one} to {other}" for one in WORLDS for other in WORLDS}
