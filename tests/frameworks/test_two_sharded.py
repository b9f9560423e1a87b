"""Accelerate and the Trainer shard a transformed model by FSDP2: the cases of two_sharded.py, in two processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.two_sharded import CASES, WORLD

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def said() -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command = [sys.executable, *launch, "-m", "tests.frameworks.two_sharded"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_two_sharded(said: str, case: str) -> None:
    assert len(re.findall(f"^{case}: equal$", said, re.MULTILINE)) == WORLD, said
