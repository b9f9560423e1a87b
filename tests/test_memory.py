"""Memory of a step is there for the next one: in processes of their own, whose C library has learnt nothing yet."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Where the heap ends, which the C library itself moves: not every kernel counts page faults.
GIVEN_BACK = """
import ctypes, torch
from fxgrad.operators.memory import keep_memory

sbrk = ctypes.CDLL(None).sbrk
sbrk.restype, sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]

def given_back():
    held = [torch.ones(1 << 20) for _ in range(10)]  # 4 MB each
    top = sbrk(0)
    held = None
    return top - sbrk(0)

for prepare in (lambda: None, keep_memory):
    prepare()
    given_back()
    print(given_back())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_the_heap_is_kept_between_steps() -> None:
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    ran = subprocess.run([sys.executable, "-c", GIVEN_BACK], env=settings, capture_output=True, text=True, check=True)
    without, kept = map(int, ran.stdout.split())
    assert kept == 0
    if not without:
        pytest.skip("this C library keeps its heap without being asked")
