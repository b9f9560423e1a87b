"""One of two processes with long cases of FSDP2: `python -m tests.sharded_long RANK FOLDER [CASE ..]`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.private_sharded import by_graphs_that_gather
from tests.sharded_collectives import one_sequence
from tests.sharded_gram import products_with_the_samples_of_all
from tests.sharded_machines import RUNS
from tests.sharded_processes import SIZES, main, sharded_after_transforming

CASES: dict[str, Callable[[int], None]] = {
    "machines that differ, through Inductor": RUNS["inductor"],
    "products with the samples of all, through Inductor": partial(
        products_with_the_samples_of_all, backend="inductor", dtype=torch.float32, tolerance=1e-5
    ),
    "one sequence of collectives, eager": partial(one_sequence, backend="eager"),
    "one sequence of collectives, aot_eager": partial(one_sequence, backend="aot_eager"),
    "private steps, aot_eager": by_graphs_that_gather,
    "sharded after transforming, every size": partial(sharded_after_transforming, sizes_of_batches=SIZES),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), Path(sys.argv[2]), CASES)
