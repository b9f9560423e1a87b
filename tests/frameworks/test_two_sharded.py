"""Accelerate and the Trainer shard a transformed model by FSDP2: the cases of two_sharded.py, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.two_sharded import CASES, WORLD

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], str]:
    """Return which cases passed in each process, and what the processes said."""
    folder = tmp_path_factory.mktemp("two_sharded")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command = [sys.executable, *launch, "-m", "tests.frameworks.two_sharded", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    passed = [folder / str(rank) for rank in range(WORLD)]
    return [file.read_text().splitlines() if file.exists() else [] for file in passed], done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_two_sharded(ran: tuple[list[list[str]], str], case: str) -> None:
    passed, said = ran
    assert all(case in names for names in passed), said
