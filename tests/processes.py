"""Programs of the tests in several processes at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def run_together(program: str, arguments: Sequence[Sequence[object]], timeout: float = 1400) -> list[str]:
    """Run a module in one process for each list of arguments; return what each printed, or fail with all of it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", program, *map(str, own)],
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},  # a process that a signal ends says where
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in arguments
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # if one of them still waits for another
    codes = [process.returncode for process in processes]
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(said)
    return said


def findings(program: str, folder: Path, *cases: str, world: int = 2, timeout: float = 1400) -> list[dict[str, Any]]:
    """Run a program in processes that meet in a folder; return what each found of its cases, or of some."""
    run_together(program, [(rank, folder, *cases) for rank in range(world)], timeout)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
