"""One of two processes in which a Trainer would train privately: `python -m tests.frameworks.two_trainers FOLDER`.

It prints what `attach` raises for each way to prepare the model; torchrun's variables are in the environment.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import tests.import_torchvision  # noqa: F401  before transformers
from fxgrad.errors import OptionError
from tests.frameworks.test_private_trainer import Private, trainer_of


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for independent in (False, True):  # the first Trainer initialises torch.distributed
        private = Private(independent=independent)
        try:
            trainer_of(private, folder)
        except OptionError as error:
            print(independent, dist.get_world_size(), error, sep="|", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
