"""The long run over random programs: `python -m tests.fuzz --backend eager --seeds 0:20000 --state FILE`.

Every outcome is one line of the state file, so that a run stopped anywhere goes on where it was. Exit code 1 on any
silent difference, any crash, and any refusal whose reason is not in `KNOWN_REFUSALS`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tests.program_oracle import Program
from tests.programs import Outcome, check, generate, is_known, quick_dynamo

RESET_EVERY = 20  # programs between two resets of Dynamo's caches
SECOND_BATCHES = (7, 5, 1, 0, None, None, None, None)  # the batch size of the second call, by seed


def run_seed(seed: int, backend: str, second: bool = True) -> tuple[int, Outcome, float]:
    """Outcome and seconds of one seed."""
    torch.set_num_threads(1)
    if seed % RESET_EVERY == 0:
        torch._dynamo.reset()
    start = time.perf_counter()
    second_batch = SECOND_BATCHES[seed % len(SECOND_BATCHES)] if second else None
    try:
        with quick_dynamo():
            outcome = check(generate(seed), backend, second_batch)
    except Exception as error:  # the generator itself
        outcome = Outcome("generator", f"{type(error).__name__}: {error}")
    return seed, outcome, time.perf_counter() - start


def outcomes(seeds: list[int], jobs: int, **how: Any) -> Iterator[tuple[int, Outcome, float]]:
    if jobs == 1:
        yield from map(partial(run_seed, **how), seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(partial(run_seed, **how), seeds, chunksize=4)


def read_state(path: Path | None) -> dict[int, Outcome]:
    """The outcomes of the seeds done so far; a line cut short by a kill is left out."""
    done: dict[int, Outcome] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        done[record["seed"]] = Outcome(record["kind"], record["reason"])
    return done


def run(seeds: Iterable[int], state: Path | None, jobs: int, **how: Any) -> dict[int, Outcome]:
    """Run what the state file lacks, adding each outcome to it."""
    done = read_state(state)
    wanted = list(seeds)
    left = [seed for seed in wanted if seed not in done]
    counts = Counter(done[seed].kind for seed in wanted if seed in done)
    with (
        tqdm(total=len(wanted), initial=len(wanted) - len(left), unit=" programs", smoothing=0.05) as bar,
        Path(state or os.devnull).open("a") as stream,
    ):
        for seed, outcome, seconds in outcomes(left, jobs, **how):
            done[seed] = outcome
            record = {
                "seed": seed,
                "kind": outcome.kind,
                "reason": outcome.reason,
                "seconds": round(seconds, 3),
            }
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            counts[outcome.kind] += 1
            bar.set_postfix(dict(counts))
            bar.update()
            if outcome.fails:
                tqdm.write(f"seed {seed}: {outcome.kind}: {outcome.reason}")
    return {seed: done[seed] for seed in wanted}


def shortest(program: Program, outcome: Outcome, **how: Any) -> Program:
    """The shortest prefix of a program with the same outcome, then without the outputs and lines it does not need."""
    for size in range(1, program.size):
        smaller = generate(program.seed, size)
        if same_outcome(smaller, outcome, **how):
            program = smaller
            break
    for k in reversed(range(len(program.outputs))):
        program = first_same(
            [without_output(program, k)] if len(program.outputs) > 1 else [],
            program,
            outcome,
            **how,
        )
    for line in reversed(program.source.splitlines()):
        shorter = replace(program, source=without_unused(program.source.replace(line + "\n", "", 1)))
        program = first_same([shorter], program, outcome, **how)
    return program


def first_same(candidates: list[Program], program: Program, outcome: Outcome, **how: Any) -> Program:
    return next((c for c in candidates if same_outcome(c, outcome, **how)), program)


def same_outcome(program: Program, outcome: Outcome, **how: Any) -> bool:
    try:
        return check(program, **how) == outcome
    except Exception:  # the line was needed
        return False


def without_unused(source: str) -> str:
    """The source without the parameters and modules that forward does not name."""
    declarations, _, forward = source.partition("    def forward")
    kept = [
        line
        for line in declarations.splitlines()
        if not (found := re.search(r"self\.([pmc]\d+)|register_buffer\(\"(c\d+)", line))
        or re.search(rf"self\.{found[1] or found[2]}\b", forward)
    ]
    return "\n".join(kept).rstrip() + "\n\n    def forward" + forward


def without_output(program: Program, k: int) -> Program:
    head, _, returned = program.source.rpartition("return ")
    codes = returned.strip().split(", ")
    if len(codes) != len(program.outputs):  # a comma inside
        return program
    outputs = program.outputs[:k] + program.outputs[k + 1 :]
    return replace(program, source=f"{head}return {', '.join(codes[:k] + codes[k + 1 :])}\n", outputs=outputs)


def report(results: dict[int, Outcome], backend: str, show: int) -> int:
    """Print counts, the refusals by reason, the shortest failing programs; the number of failures."""
    for kind, count in Counter(o.kind for o in results.values()).most_common():
        print(f"{count:7d}  {kind}")
    by_reason: dict[tuple[str, str], list[int]] = defaultdict(list)
    for seed, outcome in sorted(results.items()):
        if outcome.reason:
            by_reason[outcome.kind, outcome.reason].append(seed)
    unknown = 0
    for (kind, reason), seeds in sorted(by_reason.items(), key=lambda item: (item[0][0], -len(item[1]))):
        known = kind != "refused" or is_known(reason)
        unknown += len(seeds) * (not known)
        print(
            f"{len(seeds):7d}  {kind}: {reason}{'' if known else '   [not in KNOWN_REFUSALS]'}   e.g. seed {seeds[0]}"
        )
    failing = [(seed, o) for seed, o in sorted(results.items()) if o.fails]
    for seed, outcome in failing[:show]:
        if outcome.kind == "generator":
            continue
        second_batch = SECOND_BATCHES[seed % len(SECOND_BATCHES)]
        program = shortest(generate(seed), outcome, backend=backend, second_batch=second_batch)
        print(f"\nseed {seed}: {outcome.kind}: {outcome.reason}\nbatch {program.batch}, in_dims {program.in_dims}")
        print(program.source)
    return len(failing) + unknown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--seeds", default="0:1000", help="first:last, the last one left out")
    parser.add_argument("--state", type=Path, help="file of outcomes, one JSON line each; a run goes on from it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", type=int, default=5, help="failing programs to print, shortened")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    results = run(range(first, last), options.state, options.jobs, backend=options.backend)
    return 1 if report(results, options.backend, options.show) else 0


if __name__ == "__main__":
    sys.exit(main())
