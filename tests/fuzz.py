"""The long run over random programs: `python -m tests.fuzz --backend eager --blocks 0:200 --state FILE`.

Hypothesis draws the programs of a block from the block's number, and shrinks a program that fails. Each finished block
is one line of the state file, so a run that was stopped goes on where it was. The exit code is 1 on any silent
difference, any crash, and any refusal with a reason outside `KNOWN_REFUSALS`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import Phase
from hypothesis.errors import HypothesisException
from tqdm import tqdm

from tests.program_oracle import Program
from tests.programs import Outcome, check, for_programs, is_known, quick_dynamo

BLOCK = 500  # draws: some 300 programs
RESET_EVERY = 20  # programs between two resets of Dynamo's caches

Counts = dict[str, int]


class Failure(AssertionError):
    """A program with an outcome that must not be."""

    def __init__(self, program: Program, outcome: Outcome, second_batch: int | None) -> None:
        where = f"batch {program.batch}, then {second_batch}, in_dims {program.in_dims}"
        super().__init__(f"{outcome.kind}: {outcome.reason}\n{where}\n{program.source}")


def run_block(number: int, backend: str, count: int = BLOCK, shrink: bool = True) -> tuple[int, Counts, str]:
    """Return the outcomes of a block by kind, and the (shrunk) program that fails, if any."""
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()

    def check_one(program: Program, second_batch: int | None) -> None:
        if outcomes.total() % RESET_EVERY == 0:
            torch._dynamo.reset()
        outcome = check(program, backend, second_batch)
        outcomes[outcome.kind] += 1
        if outcome.fails or (outcome.kind == "refused" and not is_known(outcome.reason, program.source)):
            raise Failure(program, outcome, second_batch)

    try:
        with quick_dynamo():
            for_programs(check_one, number, count, phases=(Phase.generate, *[Phase.shrink] * shrink))
    except (Failure, HypothesisException) as failure:
        return number, dict(outcomes), str(failure)
    return number, dict(outcomes), ""


def blocks(numbers: list[int], jobs: int, **options: Any) -> Iterator[tuple[int, Counts, str]]:
    """Run blocks, in this process or in several."""
    if jobs == 1:
        yield from map(partial(run_block, **options), numbers)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=4) as pool:
        yield from pool.imap_unordered(partial(run_block, **options), numbers)


def read_state(path: Path | None) -> dict[int, tuple[Counts, str]]:
    """Return the finished blocks; a line cut short by a kill is left out."""
    done: dict[int, tuple[Counts, str]] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        done[record["block"]] = record["outcomes"], record["failure"]
    return done


def run(numbers: Iterable[int], state: Path | None, jobs: int, **options: Any) -> dict[int, tuple[Counts, str]]:
    """Run the blocks that the state file lacks, and add each to it."""
    done = read_state(state)
    wanted = list(numbers)
    left = [number for number in wanted if number not in done]
    totals: Counter[str] = Counter()
    with (
        tqdm(total=len(wanted), initial=len(wanted) - len(left), unit=" blocks") as bar,
        Path(state or os.devnull).open("a") as stream,
    ):
        for number, outcomes, failure in blocks(left, jobs, **options):
            done[number] = outcomes, failure
            stream.write(json.dumps({"block": number, "outcomes": outcomes, "failure": failure}) + "\n")
            stream.flush()
            totals.update(outcomes)
            bar.set_postfix(dict(totals))
            bar.update()
            if failure:
                tqdm.write(f"block {number}: {failure}")
    return {number: done[number] for number in wanted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--blocks", default="0:10", help=f"first:last, the last one left out; {BLOCK} draws each")
    parser.add_argument("--state", type=Path, help="file of blocks, one JSON line each; a run goes on from it")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    first, last = map(int, options.blocks.split(":"))
    results = run(range(first, last), options.state, options.jobs, backend=options.backend)
    totals: Counter[str] = Counter()
    for outcomes, _ in results.values():
        totals.update(outcomes)
    for kind, count in totals.most_common():
        print(f"{count:7d}  {kind}")
    failures = {number: failure for number, (_, failure) in results.items() if failure}
    for number, failure in sorted(failures.items()):
        print(f"\nblock {number}: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
