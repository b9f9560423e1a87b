"""One of two processes of private training: `python -m tests.two_private_processes RANK FOLDER SEQUENCES`.

Both run the same operations on batches of their own. The reference adds up both processes' samples, and what raises
in one process has to raise in the other.
"""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.private_machine import MODES, Pair, Shared, recovered

WORLD, LENGTH = 2, 12
DRAWN = """
    train train train train backward_of_a_batch backward_of_a_batch step step step virtual_step logical_batch
    optimizer_zero_grad optimizer_zero_grad private_zero_grad original_zero_grad fxgrad_zero_grad zero_grad_of_a_part
    evaluate forward_alone change_noise change_bound load_state assigned_grad foreign_group
    original_backward both_backward failing_backward two_forwards scaled_loss copied_optimizer copied_model
""".split()


KNOWN = {  # by seed: what once raised in one process alone, which left the other waiting
    0: [("train", 6), ("fxgrad_zero_grad", 1), ("backward_of_a_batch", 6), ("step", 0)],
}


def summed(total: Tensor) -> Tensor:
    """Over the processes."""
    total = total.clone()
    dist.all_reduce(total)
    return total


def run(shared: Shared, seed: int, rank: int) -> Counter[str]:
    draw = random.Random(seed)
    pair = Pair(shared, seed, rank, DistributedDataParallel, summed)
    # one process may have rows to change where the other has none
    names = [name for name in DRAWN if pair.one_backward or name != "assigned_grad"]
    trace: list[Any] = []
    try:
        for each in KNOWN.get(seed, [None] * LENGTH):
            trace.append(each or (draw.choice(names), draw.randrange(12)))
            pair.do(*trace[-1])
            if draw.random() < 0.3:
                pair.wrap_again()  # else DistributedDataParallel refuses everything after a backward that raised
        recovered(pair)
    except BaseException:
        print(rank, seed, trace, flush=True)
        raise
    return pair.outcomes


def main(rank: int, folder: Path, sequences: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder / 'meet'}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    for mode, options in MODES.items():
        shared, total = Shared(**options), Counter[str]()
        for seed in range(sequences):
            outcomes = run(shared, seed, rank)
            gc.collect()  # DistributedDataParallel's hooks live as long as it does
            everywhere: list[Any] = [None] * WORLD
            dist.all_gather_object(everywhere, dict(outcomes))
            assert everywhere[0] == everywhere[1], (seed, everywhere)
            total.update(outcomes)
        assert total["real steps"] > sequences
        print(mode, sequences, dict(total), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    gc.freeze()
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
