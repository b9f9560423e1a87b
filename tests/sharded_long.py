"""One of two processes with what only the long run asks of FSDP2: `python -m tests.sharded_long RANK FOLDER [CASE ..]`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.sharded_collectives import one_sequence
from tests.sharded_machines import RUNS
from tests.sharded_processes import main

CASES: dict[str, Callable[[int], None]] = {
    "machines that differ, through Inductor": RUNS["inductor"],
    "one sequence of collectives, eager": partial(one_sequence, backend="eager"),
    "one sequence of collectives, aot_eager": partial(one_sequence, backend="aot_eager"),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), Path(sys.argv[2]), CASES)
