"""Make the page demo.html: three uses of per-sample gradients on handwritten digits, with claims that are measured.

    python examples/demo [--page demo.html] [--quick]

The exit code is 1 if a claim does not hold. With --quick everything runs at a tiny size, and no claim is judged.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import influence
import noise_scale
import page
import private_training
import torch
from claims import judge

OPACUS_SAYS = ("Secure RNG turned off", "Optimal order is the largest alpha", "Full backward hook is firing")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a page of three uses of per-sample gradients.")
    parser.add_argument("--page", type=Path, default=Path("demo.html"))
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that it runs; no claim is judged")
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)
    for words in OPACUS_SAYS:
        warnings.filterwarnings("ignore", words)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these networks are too small for several
    start = time.perf_counter()
    privacy, blame, noise = (
        part.run(options.quick, options.backend) for part in (private_training, influence, noise_scale)
    )
    page.write(options.page, privacy, blame, noise, time.perf_counter() - start)
    torch.set_num_threads(threads)
    code = 0
    if not options.quick:
        code = judge([*privacy.claims(), *blame.claims(), *noise.claims()])
    print(f"the page: {options.page.resolve()}")
    return code


if __name__ == "__main__":
    sys.exit(main())
