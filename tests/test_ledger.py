"""What tests/ledger/ has written down is what becomes of the samples of PyTorch's databases, and nothing else is."""

from __future__ import annotations

import zlib

import pytest

from tests.databases import Verdict
from tests.ledgers import LEDGERS, Ledger, chosen, groups_of, outcomes_of, quick_sample, row_of

ROWS = [pytest.param(ledger, name, id=f"{key}-{name}") for key, ledger in LEDGERS.items() for name in ledger.rows]
WRITTEN = {ledger.file: ledger.read() for ledger in LEDGERS.values()}


IN_A_RUN = 3
"""Of so many ops, a quick run has one; which ones does not depend on the others. Of modules it has all."""


def is_quick(ledger: Ledger, name: str) -> bool:
    """No variant in place; with mixing allowed, what lets samples meet: the other files have what keeps them alone."""
    if ledger is not LEDGERS["modules"] and zlib.crc32(name.encode()) % IN_A_RUN:
        return False
    if ledger is LEDGERS["mixing"]:
        return any("meets:" in WRITTEN[LEDGERS[key].file].get(name, "") for key in ("ops", "modules"))
    return not name.endswith(" in place")


QUICK = [
    pytest.param(ledger, name, id=f"{key}-{name}")
    for key, ledger in LEDGERS.items()
    for name in ledger.rows
    if is_quick(ledger, name)
]
AGAIN = "Where it is meant: python -m tests.ledgers {file} {name!r}, and commit the difference."


@pytest.mark.parametrize(("ledger", "name"), QUICK)
def test_one_sample(ledger: Ledger, name: str) -> None:
    """One sample of the row, one that is right if there is one."""
    group = quick_sample(WRITTEN[ledger.file][name])
    verdicts = ledger.rows[name]([group.first])[group.first]
    _agree(outcomes_of(verdicts), group.outcomes, verdicts, ledger, name)


@pytest.mark.long
@pytest.mark.parametrize(("ledger", "name"), ROWS)
def test_row(ledger: Ledger, name: str) -> None:
    """All samples of the row."""
    judged = ledger.rows[name]()
    _agree(row_of(judged), WRITTEN[ledger.file][name], [v for found in judged.values() for v in found], ledger, name)


def _agree(found: str, written: str, verdicts: list[Verdict], ledger: Ledger, name: str) -> None:
    again = AGAIN.format(file=ledger.path.stem, name=name)
    notes = [f"  {verdict.kind}: {verdict.note}" for verdict in verdicts if verdict.note]
    assert found == written, "\n".join([f"{name}: {found}", f"written down: {written}", again, *notes])


@pytest.mark.parametrize("ledger", LEDGERS.values(), ids=LEDGERS)
def test_file(ledger: Ledger) -> None:
    """It has a row for all that the database has, in order, and no wrong number or crash is written down."""
    written = WRITTEN[ledger.file]
    assert list(written) == sorted(ledger.rows)
    assert not [name for name, row in written.items() if "wrong" in row or "crashed" in row]


def test_rows_read_as_written() -> None:
    right, refused, none = Verdict("right"), Verdict("refused:MixedSamples"), Verdict("none:no-batch")
    row = row_of({0: [none], 1: [right, right], 4: [right, none, right], 7: [refused, right], 9: [right]})
    assert row == "0 none:no-batch | 1-4 right*2 | 7 refused:MixedSamples, right | 9 right"
    assert [(g.first, g.last) for g in groups_of(row)] == [(0, 0), (1, 4), (7, 7), (9, 9)]
    assert quick_sample(row).first == 1


@pytest.mark.parametrize(("row", "first"), [("0 none:random", 0), ("0 none:empty | 3-5 refused:UnknownOp", 3)])
def test_the_quick_sample_says_something(row: str, first: int) -> None:
    assert quick_sample(row).first == first


def test_strides_are_odd() -> None:
    assert chosen(24, 24) == [*range(24)]
    assert chosen(25, 24) == [*range(0, 25, 3)]
    assert len(chosen(1440, 24)) == 24


def test_a_changed_outcome_fails() -> None:
    ledger = LEDGERS["ops"]
    with pytest.raises(AssertionError, match="written down: 0 refused:MixedSamples"):
        _agree("0 right", "0 refused:MixedSamples", [], ledger, "add")
