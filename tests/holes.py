"""Holes that are closed, opened again on purpose: random programs find each.

    python -m tests.holes              opens every hole in turn, in a copy of the project
    python -m tests.holes factories    those whose names contain one of the words

`prove_independence` would refuse what comes through, so it is off for each of them. Exit code 1 where no program of
`BLOCKS` blocks comes through a hole: then random programs would not find its like.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.fuzz import run_block
from tests.mutations import Edit, copy_of_the_project, edited

BLOCKS = 6

WITHOUT_PROOF: Edit = ("passes/prove_independence.py", "if ctx.single or not ctx.sample_dims:", "if True:")


class Hole:
    """A mend that is taken out of files of the project."""

    def __init__(self, name: str, *edits: Edit) -> None:
        self.name, self.edits = name, (WITHOUT_PROOF, *edits)


SIZES: Edit = ("fxgrad/samples/numbers.py", "self.of_samples |= new", "pass")

HOLES = [
    Hole(
        "numbers made of samples count as constants",
        SIZES,
        (
            "fxgrad/samples/numbers.py",
            "read = call.op not in QUERIES and any(holds_samples(operand.samples) for operand in operands)",
            "read = False",
        ),
    ),
    Hole("sizes made of samples count as constants", SIZES),
    Hole(
        "factories are constants, whatever they read",
        (
            "passes/infer_samples.py",
            "kind = Kind.MIXED if op.kinds & set(WITH_SAMPLES) else Kind.CONSTANT",
            "kind = Kind.CONSTANT",
        ),
    ),
    Hole(
        "only a result that is written in place is a write",
        (
            "fxgrad/ops/written.py",
            'return next(iter(call.arguments.values()), None) if call.inplace else call.get("out")',
            "return next(iter(call.arguments.values()), None) if call.inplace else None",
        ),
    ),
    Hole(
        "a write into a mixed view changes nothing",
        (
            "passes/infer_samples.py",
            "if new == SAMPLES.of(base) and new.kind is not Kind.MIXED:",
            "if new == SAMPLES.of(base) or SAMPLES.of(base).kind is Kind.MIXED:",
        ),
    ),
    Hole(
        "what is so for 2 and 3 samples is so for every number",
        (
            "fxgrad/samples/thresholds.py",
            "    if threshold > LARGEST:\n        return None",
            "    if threshold >= 0:\n        return BATCHES",
        ),
    ),
    Hole(
        "anything may follow where samples have met",
        ("passes/infer_samples.py", "if not allow and any(op.flows):", "if False:"),
    ),
    Hole(
        "a factor without a gradient may be made of all samples",
        ("fxgrad/samples/mixed.py", "    _check_factors(op, clips)\n", ""),
    ),
]


def found(hole: Hole, root: Path) -> str:
    """Return the program that comes through a hole, "" if none does."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.holes", "--search"]
    with edited(root, hole.name, *hole.edits):
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout


def search() -> str:
    """Return the first program of the blocks that is wrong in silence, "" if there is none."""
    failures = (run_block(number, "eager", shrink=False)[2] for number in range(BLOCKS))
    return next((failure for failure in failures if failure.startswith("wrong")), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--search", action="store_true", help="of this tree, the first program that fails")
    options = parser.parse_args()
    if options.search:
        print(search())
        return 0
    missed = 0
    with copy_of_the_project() as root:
        for hole in [one for one in HOLES if not options.words or any(word in one.name for word in options.words)]:
            program = found(hole, root).strip()
            missed += not program
            print(f"{'found' if program else 'NOT FOUND'}  {hole.name}\n{program}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
