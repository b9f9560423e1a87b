"""Per-sample gradients of each model by each peer: time, memory, compile time and the gates."""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.measure import Record
from benchmarks.models import MODELS
from benchmarks.peers import PEERS
from benchmarks.processes import Options, compare_all, compile_all
from benchmarks.report import Compiles, find_gates, format_gates, format_table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=100, help="fewer only above a second each")
    parser.add_argument("--compiles", type=int, default=0, help="fresh processes per compile time")
    parser.add_argument("--backend", default="inductor", help="the compiler of plain and fxgrad")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    options = Options(arguments.device, arguments.backend, arguments.rounds, arguments.seed)
    records = compare_all(options, arguments.models, arguments.peers)
    print(format_table(records), flush=True)
    compiles = compile_all(options, arguments.models, arguments.compiles)
    print(format_gates(find_gates(records, compiles)))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(records, compiles), indent=1) + "\n")


def as_json(records: list[Record], compiles: Compiles) -> dict[str, object]:
    """Everything measured, with what it was measured on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "records": [asdict(record) for record in records],
        "compiles": {
            model: {peer: [asdict(run) for run in runs] for peer, runs in by_peer.items()}
            for model, by_peer in compiles.items()
        },
        "gates": [asdict(gate) for gate in find_gates(records, compiles)],
    }


if __name__ == "__main__":
    main()
