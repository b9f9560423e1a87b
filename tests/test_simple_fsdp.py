"""SimpleFSDP's models in two processes against the loop over single samples; cases are in tests/simple_processes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.simple_more
import tests.simple_refusals  # noqa: F401 - registers cases
from tests.processes import findings
from tests.sharded_processes import WORLD
from tests.simple_processes import CASES, LONG

pytestmark = pytest.mark.timeout(1500)


QUICK = [name for name in CASES if name not in LONG]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes found: one pair of them for all cases that are not long."""
    return findings("tests.simple_processes", tmp_path_factory.mktemp("processes"), *QUICK)


@pytest.mark.parametrize("case", QUICK)
def test_simple_fsdp(found: list[dict[str, str]], case: str) -> None:
    for rank in range(WORLD):
        assert found[rank].get(case, "not run, as an earlier case failed") == "", found[rank].get(case)


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(LONG))
def test_simple_fsdp_for_long(tmp_path: Path, case: str) -> None:
    assert findings("tests.simple_processes", tmp_path, case) == [{case: ""}] * WORLD
