"""Every op of PyTorch's database with a parameter in each floating argument in turn: right, or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.every_op import ENTRIES, examine, run, total


@pytest.mark.parametrize("info", ENTRIES[::12], ids=lambda info: str(info.full_name))
def test_op(info: Any) -> None:
    """Every twelfth op, one sample each."""
    table = examine(info, few=1)
    print(f"{info.full_name}: {table}")
    assert not table.wrong, "\n".join(table.wrong)
    assert not table.crashed, "\n".join(table.crashed)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_table() -> None:
    """All ops, three samples each. A file named in FXGRAD_EVERY_OP keeps what is done."""
    state = os.environ.get("FXGRAD_EVERY_OP")
    table = total(run(ENTRIES, Path(state) if state else None).values())
    print(*table.sentences, table, sep="\n")
    assert not table.wrong, "\n".join(table.wrong)
    assert not table.crashed, "\n".join(table.crashed)
    assert table.share > 0.9
