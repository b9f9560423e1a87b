"""Per-sample gradients of each model by each peer: time, memory, compile time and the gates.

Models may be named by how they begin: `c14` is all of the single layers. `--rounds 0` only checks the results.
With `--json`, results are kept after each model and peer, beside those that the file already has;
`--show` prints and draws what it has, without measuring.

`python -m benchmarks report` writes docs/performance.md from the kept figures, and `python -m benchmarks keep` takes
new ones from such a file: see benchmarks/page.py.
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import page
from benchmarks.models import MODELS, find_models
from benchmarks.peers import PEERS
from benchmarks.plot import draw
from benchmarks.processes import Options, compare_all, compile_all, rates_alone
from benchmarks.report import (
    find_gates,
    format_gates,
    format_line,
    format_markdown,
    format_rates,
    format_table,
)
from benchmarks.results import Results, load
from benchmarks.tasks import QUANTITIES


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--models", nargs="+", default=[""], help=f"of {', '.join(MODELS)}; or how they begin")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--quantities", nargs="+", choices=QUANTITIES, default=list(QUANTITIES))
    parser.add_argument("--rounds", type=int, default=100, help="fewer only above a second each")
    parser.add_argument("--compiles", type=int, default=0, help="fresh processes per compile time")
    parser.add_argument("--backend", default="inductor", help="the compiler of plain and fxgrad")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, help="samples, in place of each model's own number")
    parser.add_argument("--json", type=Path, help="where everything that was measured is kept")
    parser.add_argument("--plot", type=Path, help="where to draw the ratios")
    parser.add_argument("--table", type=Path, help="where to write a table in Markdown")
    parser.add_argument("--show", action="store_true", help="measure nothing: print what the JSON file has")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] in (["report"], ["keep"]):
        return page.main(sys.argv[1:])
    arguments = parse_arguments()
    results = load(arguments.json)
    if not arguments.show:
        measure(arguments, results)
    print(format_table(results.records), flush=True)
    print(format_rates(results))
    print(format_gates(find_gates(results)))
    if arguments.plot:
        draw(results, arguments.plot)
    if arguments.table:
        arguments.table.write_text(format_markdown(results))


def measure(arguments: argparse.Namespace, results: Results) -> None:
    """Everything asked for, kept after each step."""
    models = find_models(arguments.models)
    asked = (arguments.device, arguments.backend, arguments.rounds, arguments.seed, tuple(arguments.quantities))
    if arguments.rounds:
        results.rates = rates_alone(Options(*asked)).best(results.rates)
    options = Options(*asked, results.rates, arguments.batch)
    for record in compare_all(options, models, arguments.peers):
        results.add(record)
        results.save(arguments.json)
        tqdm.write(format_line(record))
    for first in compile_all(options, models, arguments.compiles):
        results.compiles.append(first)
        results.save(arguments.json)


if __name__ == "__main__":
    main()
