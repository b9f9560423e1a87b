"""examples/fsdp2_private.py over two processes of torchrun, and its checkpoints in one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = "--sentences 8 --batch 8 --epochs 2 --backend eager".split()  # every sentence in each step

pytestmark = pytest.mark.timeout(1500)


def run(*command: str) -> list[list[str]]:
    """Return the lines of each run of the example, the whole model's and the adapters'."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = done.stdout.split("good\n")
    assert len(runs) == 3 and not runs[2], done.stdout + done.stderr
    return [one.splitlines() for one in runs[:2]]


def test_one_process_goes_on_where_two_have_stopped(tmp_path: Path) -> None:
    folders = [str(tmp_path / "whole"), str(tmp_path / "adapters")]
    example = ("-m", "tests.zoo.two_fsdp2_private")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first = run(*torchrun, *example, *TINY, "--save", folders[0], "then", *TINY, "--adapters", "--save", folders[1])
    second = run(*example, *TINY, "--resume", folders[0], "then", *TINY, "--adapters", "--resume", folders[1])
    for frozen, before, after in zip((0, 21), first, second, strict=True):
        assert before[0] == f"2 process(es), 2 private steps; {frozen} tensors are frozen"
        assert after[0] == f"1 process(es), 2 private steps; {frozen} tensors are frozen"
        losses = [re.findall(r"\d+\.\d{4}", lines[1]) for lines in (before, after)]
        assert losses[0][1] == losses[1][0] != losses[0][0]
        assert before[2].endswith("of 2 steps") and after[2].endswith("of 4 steps")
