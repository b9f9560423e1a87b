"""Memory of a step is there for the next one: in processes of their own, whose C library has learnt nothing yet."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from fxgrad.operators.memory import keep_memory

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        held = [torch.ones(1 << 20) for _ in range(10)]  # 4 MB each
        held = None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for prepare in (lambda: None, keep_memory):
    prepare()
    faults(3)
    print(faults(10))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_the_heap_is_kept_between_steps() -> None:
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    ran = subprocess.run([sys.executable, "-c", FAULTS], env=settings, capture_output=True, text=True, check=True)
    without, kept = map(int, ran.stdout.split())
    assert without > 100 and kept < without / 10
