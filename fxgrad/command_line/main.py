"""The commands, their options, and their exit codes: 0, 1 for a fault or a refused model, 2 for wrong input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fxgrad.command_line import doctor, factories
from fxgrad.command_line.factories import WrongInput
from fxgrad.errors import FxgradError


def main(arguments: Sequence[str], version: str) -> int:
    """Run one command, and return its exit code."""
    options = parser(version).parse_args(arguments)
    if options.command == "doctor":
        findings = doctor.examine(version, measure=options.measure)
        print(doctor.report(findings))
        return int(any(finding.fault for finding in findings))
    try:
        explanation = factories.explain_result_of(options.factory, options.out)
    except WrongInput as error:
        print(f"python -m fxgrad explain: {error}", file=sys.stderr)
        return 2
    except FxgradError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{explanation}\n\nThe page: {options.out}")
    return 0


def parser(version: str) -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(prog="python -m fxgrad", description="Exact per-sample gradients for PyTorch.")
    top.add_argument("--version", action="version", version=f"fxgrad {version}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    looking = commands.add_parser(
        "doctor",
        help="look at versions, compiler, kernels, caches and machine",
        description="Look at everything that fxgrad needs. The exit code is 1 if something is wrong.",
    )
    looking.add_argument("--measure", action="store_true", help="also measure the speed of this machine, in 0.3 s")
    explaining = commands.add_parser(
        "explain",
        help="explain a model: print the table, write the page",
        description="Explain a model as fxgrad.explain does. The exit code is 1 if fxgrad refuses the model, and 2 "
        "if the input is wrong.",
    )
    explaining.add_argument(
        "factory",
        metavar="module:factory",
        help="a function that returns (model, args) or (model, args, kwargs); a transformed model is explained for "
        "its own quantities",
    )
    explaining.add_argument(
        "--out", type=Path, default=Path("explanation.html"), help="the page to write (explanation.html)"
    )
    return top
