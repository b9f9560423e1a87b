"""One process of an example in several runs: `torchrun .. -m tests.zoo.two_fsdp2_private OPTIONS then OPTIONS`.

The processes meet once for all runs: a second process group in the same store of torchrun may read the first one's
keys.
"""

from __future__ import annotations

import sys
import warnings
from itertools import groupby

import torch
import torch.distributed as dist

import tests.import_torchvision  # noqa: F401  before transformers
from tests.examples import load

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module = load("fsdp2_private")
    device = module.meet()
    for is_end, run in groupby(sys.argv[1:], lambda word: word == "then"):
        if is_end:
            continue
        if not module.train(module.parse(list(run)), device):
            sys.exit(1)
        if dist.get_rank() == 0:
            print("good", flush=True)
    dist.destroy_process_group()
