"""What becomes of each sample of PyTorch's databases, as tests/ledger/ has it written down.

    python -m tests.ledgers                     writes all files anew, in an hour
    python -m tests.ledgers ops add "sub in place"   writes these rows of ops.txt anew

Write a row anew after a change that refuses less, and read the difference before it is committed: a sample that was
right and is refused now is a mistake as much as a wrong number. `make long` compares every row, `make test` one
sample of each module and of a third of the ops, and of those that let samples meet, one with `mixing="allow"`, too;
the variants in place are the long run's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fxgrad.costs import machines
from tests import every_op
from tests.database_models import module_case, op_cases
from tests.databases import IN_EVERY_WAY, Case, Verdict, judge, module_db
from tests.programs import quick_dynamo

FOLDER = Path(__file__).parent / "ledger"
MOST, MOST_MIXING = 24, 8
"""Samples of one row: of a row with more, products of all options of an op, one in so many is taken."""

SECONDS = 600  # for one row

Judged = dict[int, list[Verdict]]
"""The verdicts on each sample, by its index in the database."""

Row = Callable[..., Judged]
"""Finds the verdicts of one row: on its samples, or on those with the indices that are given."""


@dataclass(frozen=True)
class Ledger:
    """A file, and its rows by name."""

    file: str
    about: str
    rows: dict[str, Row]

    @property
    def path(self) -> Path:
        return FOLDER / self.file

    def read(self) -> dict[str, str]:
        """The outcomes of each row, as they are written down."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return dict(line.split(": ", 1) for line in lines if line and not line.startswith("#"))

    def write(self, rows: dict[str, str]) -> None:
        header = [f"# {line}".rstrip() for line in (self.about + LEGEND).splitlines()]
        lines = [f"{name}: {outcomes}" for name, outcomes in sorted(rows.items())]
        whole = self.path.with_suffix(".tmp")  # stopped anywhere, it leaves the file as it was
        whole.write_text("\n".join([*header, "", *lines]) + "\n")
        whole.replace(self.path)


LEGEND = """
A row is `name: indices outcomes | indices outcomes`, for samples by their index in PyTorch's database; of a row with
many, one in so many is taken. Samples that follow each other with the same outcomes are one group, `first-last`.

right        the numbers are those of a loop over single samples in float64
refused:X    a batch exists, and fxgrad raises X all the same
meets:X      the samples meet, and fxgrad raises X, as it has to
meets:right  the samples meet, and each has its own share, dL/dW(i)
none:why     nothing to compare: no gradient, no elements, no batch, random numbers, sparse tensors, or the op fails

`*2` behind an outcome: in two ways of making a model of the sample. `python -m tests.ledgers` writes this file anew.
"""


# ---------------------------------------------------------------------------- rows as text


def outcomes_of(verdicts: list[Verdict]) -> str:
    """The verdicts on one sample: `right*2, refused:MixedSamples`; none:why only where nothing else is."""
    kinds = Counter(verdict.kind for verdict in verdicts)
    told = {kind: n for kind, n in kinds.items() if not kind.startswith("none:")} or dict.fromkeys(sorted(kinds)[:1], 1)
    return ", ".join(f"{kind}*{n}" if n > 1 else kind for kind, n in sorted(told.items()))


def row_of(judged: Judged) -> str:
    """The text of a row: samples that follow each other with the same outcomes are one group."""
    texts = [(index, outcomes_of(verdicts)) for index, verdicts in sorted(judged.items())]
    groups = [(text, [index for index, _ in group]) for text, group in groupby(texts, key=lambda pair: pair[1])]
    return " | ".join(f"{'-'.join(map(str, dict.fromkeys((ids[0], ids[-1]))))} {text}" for text, ids in groups)


@dataclass(frozen=True)
class Group:
    """Samples of a row that follow each other with the same outcomes."""

    first: int
    last: int
    outcomes: str


def groups_of(row: str) -> list[Group]:
    """A row's text, parsed."""
    found = []
    for part in row.split(" | "):
        indices, outcomes = part.split(" ", 1)
        first, _, last = indices.partition("-")
        found.append(Group(int(first), int(last or first), outcomes))
    return found


def quick_sample(row: str) -> Group:
    """The group whose first sample stands for the row in a quick run: one that is right, if any is."""
    groups = groups_of(row)
    right = (group for group in groups if re.search(r"(^|, )right\b", group.outcomes))
    return next(right, next((group for group in groups if not group.outcomes.startswith("none:")), groups[0]))


def chosen(count: int, most: int) -> list[int]:
    """The indices of a row with `count` samples; the stride is odd, so that options in pairs are both seen."""
    return list(range(0, count, 1 if count <= most else -(-count // most) | 1))


# ---------------------------------------------------------------------------- the rows


@contextmanager
def _surroundings() -> Iterator[None]:
    """What every verdict is found under; Dynamo's caches are left empty."""
    with (
        warnings.catch_warnings(),  # the samples include uses that PyTorch advises against
        quick_dynamo(),
        mock.patch.dict(os.environ, {machines.VARIABLE: "reference"}),
        mock.patch("torch.testing._internal.common_methods_invocations.wrapper_set_seed", _unseeded),
    ):
        warnings.simplefilter("ignore")
        yield
        torch._dynamo.reset()


def _unseeded(op: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of what sets a random seed around an op, which no graph can hold."""
    return op(*args, **kwargs)


def _judged(
    samples: Callable[[], list[Any]],
    judge_one: Callable[[int, Any], list[Verdict]],
    most: int,
    only: Collection[int] | None = None,
) -> Judged:
    """The verdicts on the samples of one row, each under the same random numbers whichever others are judged."""
    with _surroundings():
        torch.manual_seed(0)
        every = samples()
        found = {}
        for index in chosen(len(every), most) if only is None else only:
            torch.manual_seed(index)
            found[index] = judge_one(index, every[index])
    return found


def _samples_of(info: Any) -> list[Any]:
    return list(info.sample_inputs("cpu", torch.float64, requires_grad=True))


def _judge_op(info: Any, index: int, sample: Any) -> list[Verdict]:
    """Each floating tensor as the parameter; for ops that say so, each tensor batched along each of its dims, too."""
    name = f"{info.full_name}[{index}]"
    found, why = every_op.ways(info, name, sample)
    verdicts = [every_op.judge(way, input_gradients=k % 2 == 0) for k, way in enumerate(found)]
    if info in IN_EVERY_WAY and not sample.kwargs.get("dropout_p"):
        verdicts += [_with_and_without_input_gradients(case) for case in op_cases(info.op, name, sample)]
    return verdicts or [Verdict(f"none:{why}")]


def _with_and_without_input_gradients(case: Case) -> Verdict:
    verdicts = [judge(case.with_input_gradients(wanted)) for wanted in (True, False)]
    return next((verdict for verdict in verdicts if verdict.kind != "right"), verdicts[0])


def _judge_mixing(info: Any, index: int, sample: Any) -> list[Verdict]:
    found, why = every_op.ways(info, f"{info.full_name}[{index}]", sample)
    return [every_op.judge_mixing(way) for way in found] or [Verdict(f"none:{why}")]


def _modules_of(info: Any, training: bool) -> list[Any]:
    return list(info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training))


def _module_case(info: Any, training: bool, index: int, sample: Any) -> Case | None:
    """The module of a sample with its inputs, if it has parameters."""
    model = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double().train(training)
    if not any(True for _ in model.parameters()):
        return None
    name = f"{info.name}[{index}] in {'training' if training else 'evaluation'}"
    return module_case(model, name, sample.forward_input.args, sample.forward_input.kwargs)


def _judge_module(info: Any, training: bool, index: int, sample: Any) -> list[Verdict]:
    case = _module_case(info, training, index, sample)
    return [Verdict("none:no-gradient") if case is None else judge(case)]


def _judge_mixing_module(info: Any, training: bool, index: int, sample: Any) -> list[Verdict]:
    case = _module_case(info, training, index, sample)
    return [Verdict("none:no-gradient") if case is None else every_op.judge_mixing(every_op.Way(case))]


def _op_row(judge_one: Callable[[Any, int, Any], list[Verdict]], info: Any, most: int) -> Row:
    return partial(_judged, partial(_samples_of, info), partial(judge_one, info), most)


def _module_rows(judge_one: Callable[..., list[Verdict]], most: int) -> dict[str, Row]:
    return {
        f"{info.name} {'training' if training else 'evaluation'}": partial(
            _judged, partial(_modules_of, info, training), partial(judge_one, info, training), most
        )
        for info in MODULES
        for training in ((True, False) if info.train_and_eval_differ else (True,))
    }


OPS: list[Any] = [*every_op.ENTRIES, *every_op.IN_PLACE]
RECURRENT = re.compile(r"nn\.(RNN|LSTM|GRU)(Cell)?$")
MODULES = [info for info in module_db if not RECURRENT.match(info.name)]
"""All but the recurrent ones, which tests/test_recurrent.py has with every option."""

LEDGERS = {
    "ops": Ledger(
        "ops.txt",
        "Gradients per sample of each op of PyTorch's operator database, and of the variants in place.\n",
        {info.full_name: _op_row(_judge_op, info, MOST) for info in OPS},
    ),
    "modules": Ledger(
        "modules.txt",
        "Gradients per sample of each module of PyTorch's module database, in training and in evaluation.\n",
        _module_rows(_judge_module, MOST),
    ),
    "mixing": Ledger(
        "mixing.txt",
        'mixing="allow": `grad_sample.sum(0)` and Grad() against the ordinary gradient, of each op and module.\n'
        "`right` here says that both are equal to it, whether or not the samples meet.\n",
        {info.full_name: _op_row(_judge_mixing, info, MOST_MIXING) for info in every_op.ENTRIES}
        | _module_rows(_judge_mixing_module, MOST_MIXING),
    ),
}


# ---------------------------------------------------------------------------- the command


def _apart(row: Row) -> str:
    """The text of a row, found in a process of its own: an op may write beside its memory."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=lambda: writer.send(row_of(row())))
    process.start()
    writer.close()
    try:
        if not reader.poll(SECONDS):
            return "0 crashed:Timeout"
        return str(reader.recv())
    except EOFError:
        return "0 crashed:Process"
    finally:
        process.kill()
        process.join()


def rewrite(ledger: Ledger, names: Collection[str]) -> None:
    """Finds the rows anew; those that are no longer in the database are dropped."""
    rows = {name: text for name, text in ledger.read().items() if name in ledger.rows}
    for name in names or ledger.rows:
        text = _apart(ledger.rows[name])
        if text != rows.get(name):
            print(f"{name}: {text}", flush=True)
        rows[name] = text
        ledger.write(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ledger", nargs="?", choices=LEDGERS, help="one file alone")
    parser.add_argument("rows", nargs="*", help="rows of this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    next(iter(LEDGERS["ops"].rows.values()))([0])  # what the first compilation of all loads, the processes then have
    for name in [given.ledger] if given.ledger else LEDGERS:
        rewrite(LEDGERS[name], given.rows)


if __name__ == "__main__":
    main()
