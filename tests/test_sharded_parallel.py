"""FSDP2 around tensor parallelism in four processes; each case is in tests/sharded_parallel.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.sharded_parallel_refusals  # noqa: F401 - registers cases
from tests.processes import findings
from tests.sharded_parallel import CASES, LONG, WORLD

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of four processes found: one launch of them for all cases that are short."""
    return findings("tests.sharded_parallel", tmp_path_factory.mktemp("processes"), world=WORLD)


@pytest.mark.parametrize("case", [name for name in CASES if name not in LONG])
def test_sharded_parallel(found: list[dict[str, str]], case: str) -> None:
    for rank in range(WORLD):
        assert found[rank].get(case, "not run, as an earlier case failed") == "", found[rank].get(case)


@pytest.mark.long
def test_long(tmp_path: Path) -> None:
    for one in findings("tests.sharded_parallel", tmp_path, *LONG, world=WORLD):
        assert one == dict.fromkeys(one, "") and one.keys() == set(LONG)
