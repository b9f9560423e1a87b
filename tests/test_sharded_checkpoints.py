"""Checkpoints of sharded models between 1, 2 and 4 processes, each way; see tests/sharded_checkpoints.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_together
from tests.sharded_checkpoints import WORLDS


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_checkpoints_move_between_numbers_of_processes(tmp_path: Path) -> None:
    every = set()
    for do in ("save", "load"):
        each = [(rank, tmp_path, world, do) for world in WORLDS for rank in range(world)]
        said = run_together("tests.sharded_checkpoints", each, timeout=700)
        every = {line.partition(":")[0] for text in said for line in text.splitlines() if " to " in line}
    assert every == {f"{one} to {other}" for one in WORLDS for other in WORLDS}
